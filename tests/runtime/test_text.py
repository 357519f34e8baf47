"""Text as it comes: whole characters, nothing taken back, stop texts wherever they are cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.runtime.text import StopFinder, TextCodec
from tests import tiny

SAMPLES = [
    "plain words, and  two spaces\n\tand a tab",
    "naïve café — “quotes”",
    "東京は日本の首都です。한국어도",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 thumb",
    "mixed 漢字 and 🙂🙂 and ascii",
]


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    """Every byte is a token: each character of more than one byte comes in pieces."""
    folder = tmp_path_factory.mktemp("codec")
    (folder / "tokenizer.json").write_text(tiny.byte_tokenizer().to_str())
    (folder / "chat_template.jinja").write_text(tiny.CHAT_TEMPLATE)
    return TextCodec(folder, {})


def streamed(codec: TextCodec, ids: list[int], sizes: list[int]) -> list[str]:
    """Pieces of text when tokens come in groups of the given sizes, over and over."""
    stream, pieces, at, turn = codec.stream(), [], 0, 0
    while at < len(ids):
        size = sizes[turn % len(sizes)]
        pieces.append(stream.push(ids[at : at + size]))
        at, turn = at + size, turn + 1
    return [*pieces, stream.finish()]


@pytest.mark.parametrize("text", SAMPLES)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_pieces_are_whole_characters_and_add_up(codec: TextCodec, text: str, size: int) -> None:
    pieces = streamed(codec, codec.ids(text), [size])
    assert "".join(pieces) == text
    assert "�" not in "".join(pieces)


@settings(max_examples=300, deadline=None)
@given(text=st.text(), sizes=st.lists(st.integers(1, 8), min_size=1, max_size=4))
def test_any_text_in_any_pieces(codec: TextCodec, text: str, sizes: list[int]) -> None:
    ids = codec.ids(text)
    assert "".join(streamed(codec, ids, sizes)) == codec.text(ids)


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 255), max_size=40))
def test_any_bytes_end_as_the_whole_text(codec: TextCodec, ids: list[int]) -> None:
    """Even bytes that are no text: what was shown is never taken back, and the end is complete."""
    assert "".join(streamed(codec, ids, [1])) == codec.text(ids)


def test_a_cut_character_is_shown_as_such_at_the_end_only(codec: TextCodec) -> None:
    ids = codec.ids("ok 🙂")[:-1]
    pieces = streamed(codec, ids, [1])
    assert "".join(pieces[:-1]) == "ok "
    assert set(pieces[-1]) == {"�"}


# Stop texts


def found(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    """(all that was shown, the stop text)."""
    finder, shown = StopFinder(stops), ""
    for piece in pieces:
        text, stop = finder.push(piece)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + finder.finish(), None


def test_a_stop_text_over_many_pieces_is_never_shown() -> None:
    assert found(["END"], ["some E", "N", "D more"]) == ("some ", "END")
    assert found(["END"], ["some E", "N", "O"]) == ("some ENO", None)
    assert found(["aab"], ["a", "a", "a", "b"]) == ("a", "aab")


def test_only_what_may_become_a_stop_text_is_held_back() -> None:
    finder = StopFinder(["\n\nUser:"])
    assert finder.push("Hello\n") == ("Hello", None)
    assert finder.push("x") == ("\nx", None)
    assert finder.push("\n\nUse") == ("", None)
    assert finder.finish() == "\n\nUse"


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("abc", max_size=5), max_size=10),
)
def test_pieces_do_not_matter(stops: list[str], pieces: list[str]) -> None:
    """Letter by letter, the first stop text to be complete ends the text before it."""
    letters = list("".join(pieces))
    shown, stop = found(stops, letters)
    text = "".join(pieces)
    ends = sorted((text.find(s) + len(s), text.find(s), s) for s in stops if s in text)
    if not ends:
        assert (shown, stop) == (text, None)
        return
    first = [e for e in ends if e[0] == ends[0][0]]
    assert shown == text[: min(position for _, position, _ in first)]
