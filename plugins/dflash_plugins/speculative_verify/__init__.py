"""How much of a block the target agrees with, and its own next token."""
