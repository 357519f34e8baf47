"""What is known of our op domain without the ops: the compiler's process needs no more of them, and
is smaller by what they import."""

DOMAIN = "dflash"
COLLECTIVES = ("AllReduce", "AllGather")
# Token ids travel between ranks as fp32, which holds every integer up to here.
MOST_TOKENS = 1 << 24
