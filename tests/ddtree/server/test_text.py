from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from toolkit.ddtree.server.text import TextStream

_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
_VOCABULARY = {char: i for i, char in enumerate([*_ALPHABET, ";="])}
_TOKENIZER = Tokenizer(models.BPE(_VOCABULARY, [(";", "=")]))
_TOKENIZER.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
_TOKENIZER.decoder = decoders.ByteLevel()


def _encode(text):
    return _TOKENIZER.encode(text).ids


def _stream(tokens, cuts, stop=(), matched=None):
    stream = TextStream(_TOKENIZER.decode, stop)
    bounds = [0, *sorted(cuts), len(tokens)]
    *pieces, last = [tokens[start:end] for start, end in pairwise(bounds)]
    deltas = [stream.push(piece) for piece in pieces]
    return [*deltas, stream.finish(last, matched)], stream


@given(tokens=st.lists(st.integers(0, 256), max_size=30), data=st.data())
def test_deltas_concatenate_to_the_decoding_whatever_the_bytes_and_cuts(tokens, data):
    cuts = data.draw(st.lists(st.integers(0, len(tokens)), max_size=8))
    deltas, stream = _stream(tokens, cuts)
    assert "".join(deltas) == stream.text == _TOKENIZER.decode(tokens)


def test_a_character_is_never_sent_in_parts():
    tokens = _encode("a\N{EURO SIGN}\N{GRINNING FACE}z")
    deltas, _ = _stream(tokens, range(len(tokens)))
    assert [delta for delta in deltas if delta] == ["a", "\N{EURO SIGN}", "\N{GRINNING FACE}", "z"]


@pytest.mark.parametrize("cuts", [(), range(20)])
def test_a_stop_string_is_cut_and_no_part_of_it_sent(cuts):
    tokens = _encode("value = 1\n\ndef")
    deltas, _ = _stream(tokens[:11], [cut for cut in cuts if cut < 11], stop=("\n\n",), matched="\n\n")
    assert "".join(deltas) == "value = 1"
    assert "\n" not in "".join(deltas)


def test_what_only_begins_a_stop_string_is_sent_later():
    deltas, _ = _stream(_encode("a##b"), range(4), stop=("###",))
    assert "".join(deltas) == "a##b"
    assert deltas[2] == "", "the second # may be the start of ###"


@pytest.mark.parametrize("cuts", [(), range(6)])
@pytest.mark.parametrize("text", ["x;yy;", "x;yy;="])
def test_an_earlier_occurrence_that_did_not_end_it_stays(text, cuts):
    """As with min_new_tokens: only the occurrence in the last token is the one that matched."""
    tokens = _encode(text)
    assert len(tokens) == 5
    deltas, _ = _stream(tokens, [cut for cut in cuts if cut < 5], stop=(";",), matched=";")
    assert "".join(deltas) == "x;yy"


def test_a_stop_string_inside_the_last_token_is_cut_with_what_follows_it():
    deltas, _ = _stream(_encode("ab;="), (2,), stop=(";",), matched=";")
    assert "".join(deltas) == "ab"


def test_without_stop_strings_the_matched_one_stays():
    deltas, _ = _stream(_encode("ab;"), (), stop=(), matched=";")
    assert "".join(deltas) == "ab;"
