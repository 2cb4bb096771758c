"""Bytes on the wire: everything comes back exactly, their count is known beforehand, damage is noticed."""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor

from vitfleet import wire
from vitfleet.errors import UserError
from vitfleet.message import Message, Number, Payload, State
from vitfleet.wire import (
    decode,
    decode_chunks,
    encode,
    encode_chunks,
    encoded_size,
    read_payload,
    tensors_size,
    write_payload,
)

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]
SHAPES = [(), (1,), (0,), (3, 0, 2), (2, 3), (2, 1, 3, 2)]

# Names that JSON must escape, and numbers of bytes that differ from numbers of characters.
names = st.one_of(
    st.text(max_size=12),
    st.text(st.sampled_from('"\\/\x00\x1f\x7f\n\t\b\r\f\u2028é漢🚀 .'), max_size=12),
    st.from_regex(r"blocks\.[0-9]{1,3}\.(weight|bias)", fullmatch=True),
).filter(lambda name: name != "__metadata__")
floats = st.floats()
integers = st.integers(-(2**80), 2**80)
values: st.SearchStrategy[Number] = st.one_of(
    integers, floats, st.lists(integers, max_size=4), st.lists(floats, max_size=4)
)
tensors = st.builds(
    lambda dtype, shape: torch.zeros(shape, dtype=dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 12), max_size=4).map(tuple),
)
messages = st.builds(
    Message,
    st.dictionaries(names, tensors, max_size=8),
    st.dictionaries(st.text(max_size=12), values, max_size=6),
)


def sample(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 50
    return drawn > 0 if dtype == torch.bool else drawn.to(dtype)


def assert_same(left: Payload, correct: Payload) -> None:
    assert left.tensors.keys() == correct.tensors.keys()
    for name, tensor in left.tensors.items():
        assert correct.tensors[name].dtype == tensor.dtype
        assert correct.tensors[name].shape == tensor.shape
        assert torch.equal(correct.tensors[name], tensor)
    assert left.numbers.keys() == correct.numbers.keys()
    for key, value in left.numbers.items():
        assert_same_number(correct.numbers[key], value)


def assert_same_number(left: Number, correct: Number) -> None:
    assert type(left) is type(correct)
    if isinstance(left, list) and isinstance(correct, list):
        assert len(left) == len(correct)
        for one, other in zip(left, correct, strict=True):
            assert_same_number(one, other)
    elif isinstance(left, float) and isinstance(correct, float):
        assert struct.pack("<d", left) == struct.pack("<d", correct) or (math.isnan(left) and math.isnan(correct))
    else:
        assert left == correct


def framed(header: object, payload: bytes = b"") -> bytes:
    """Lay out bytes as the format does, with a header of our own."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + payload


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_come_back_exactly(dtype: torch.dtype) -> None:
    sent = Message({f"tensor {shape}": sample(dtype, shape) for shape in SHAPES})
    assert_same(decode(Message, encode(sent)), sent)


@given(messages)
@settings(deadline=None)
def test_any_message_comes_back(sent: Message) -> None:
    assert_same(decode(Message, encode(sent)), sent)


@given(messages)
@settings(deadline=None)
def test_the_format_is_that_of_safetensors(sent: Message) -> None:
    """Byte for byte what the library writes, and what it reads."""
    plain = {name: tensor.clone() for name, tensor in sent.tensors.items()}
    numbers = json.dumps(dict(sent.numbers), separators=(",", ":"))
    assert encode(sent) == save(plain, {"numbers": numbers})
    assert_same(Message(load(encode(sent)), sent.numbers), sent)


@given(messages, st.integers(1, 300))
@settings(deadline=None)
def test_pieces_are_the_same_bytes(sent: Message, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "PIECE", size)
        pieces = list(encode_chunks(sent))
    assert b"".join(pieces) == encode(sent)
    assert all(len(piece) == size for piece in pieces[:-1])
    assert 0 < len(pieces[-1]) <= size
    assert_same(decode_chunks(Message, iter(pieces), len(encode(sent))), sent)


def test_a_file_is_the_same_bytes(tmp_path: Path) -> None:
    sent = State({"a": torch.randn(3, 5), "b": torch.ones(2, dtype=torch.int64)}, {"n": 1})
    write_payload(tmp_path / "state", sent)
    assert (tmp_path / "state").read_bytes() == encode(sent)
    assert_same(read_payload(State, tmp_path / "state"), sent)


def test_pieces_are_let_go_while_they_are_read() -> None:
    """Of a large message that came in pieces, never all of them and all its tensors are there at once."""
    sent = Message({str(place): torch.full((2**20,), float(place)) for place in range(4)})  # 4 MiB each
    pieces, held = list(encode_chunks(sent)), []

    def hand_over() -> Iterator[bytes]:
        pieces.reverse()
        while pieces:
            held.append(len(pieces))
            yield pieces.pop()

    assert_same(decode_chunks(Message, hand_over(), encoded_size(sent)), sent)
    assert held == list(range(17, 0, -1))


@given(messages)
@example(Message())
@example(Message(numbers={"loss": 0.1, "order": [3, 1, 2]}))
@example(Message({"a": torch.zeros(99), "b": torch.zeros(1, dtype=torch.int64), "é": torch.zeros(())}))
@settings(deadline=None, max_examples=300)
def test_the_size_is_known_without_encoding(sent: Message) -> None:
    assert encoded_size(sent) == len(encode(sent))


def test_the_size_of_a_real_model_is_known() -> None:
    weights = {f"blocks.{i}.mlp.fc{j}.weight": torch.zeros(64, 16) for i in range(12) for j in (1, 2)}
    sent = State({**weights, "steps": torch.zeros(3, dtype=torch.int64)}, {"samples": 500, "loss": 1 / 3})
    assert encoded_size(sent) == len(encode(sent))
    assert tensors_size(sent) == 24 * 64 * 16 * 4 + 3 * 8


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3).T,
        torch.arange(24.0).view(2, 3, 4)[:, ::2, 1:3],
        torch.ones(1).expand(5),
        torch.arange(10.0)[3:7],
        torch.arange(4.0).requires_grad_(),
        torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
    ],
    ids=["transposed", "strided", "expanded", "part", "requires grad", "channels last"],
)
def test_views_travel_by_value(tensor: Tensor) -> None:
    sent = Message({"tensor": tensor})
    back = decode(Message, encode(sent)).tensors["tensor"]
    assert torch.equal(back, tensor.detach())
    assert not back.requires_grad
    assert encoded_size(sent) == len(encode(sent))
    assert len(encode(sent)) == len(encode(Message({"tensor": tensor.detach().clone()})))  # not the whole storage


def test_tensors_that_share_memory_travel_by_value() -> None:
    """A state may hold one tensor under two names (an anchor and the weights before the first step)."""
    weights = torch.arange(6.0)
    sent = State({"weights": weights, "anchor": weights, "part": weights[2:5]})
    assert_same(decode(State, encode(sent)), sent)
    assert encoded_size(sent) == len(encode(sent))


INTEGERS = [0, -1, 2**63, 2**80]
FLOATS = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, 1.0, math.inf, -math.inf, math.nan]
LISTS = [[], [1, 2, 3], [0.1, 1.0, math.nan], list(range(1000))]


@pytest.mark.parametrize("value", [*INTEGERS, *FLOATS, *LISTS], ids=lambda value: str(value)[:20])
def test_numbers_come_back_exactly(value: Number) -> None:
    assert_same_number(decode(Message, encode(Message(numbers={"n": value}))).numbers["n"], value)


@pytest.mark.parametrize("kind", [Payload, Message, State])
def test_the_kind_is_the_one_asked_for(kind: type[Payload]) -> None:
    assert type(decode(kind, encode(kind({"a": torch.ones(2)}, {"b": 1})))) is kind


def test_what_was_decoded_can_be_written_to() -> None:
    data = encode(Message({"a": torch.zeros(4)}))
    decode(Message, data).tensors["a"].add_(1)
    assert torch.equal(decode(Message, data).tensors["a"], torch.zeros(4))


def test_equal_messages_are_equal_bytes() -> None:
    one = Message({"b": torch.ones(2), "a": torch.zeros(3)}, {"n": 1})
    other = Message({"a": torch.zeros(3), "b": torch.ones(2)}, {"n": 1})
    assert encode(one) == encode(other)


WHOLE = encode(Message({"a": torch.arange(5.0), "b": torch.ones(2, dtype=torch.int64)}, {"samples": 3}))


def test_cut_bytes_are_noticed() -> None:
    for length in range(len(WHOLE)):
        with pytest.raises(UserError, match=f"message of {length} bytes cannot be read"):
            decode(Message, WHOLE[:length])


@given(st.data())
@settings(deadline=None, max_examples=300)
def test_a_damaged_header_is_noticed_or_harmless(data: st.DataObject) -> None:
    """Whatever happens to the header, the answer is a message or a complaint, never a crash."""
    end = 8 + int.from_bytes(WHOLE[:8], "little")
    position = data.draw(st.integers(0, end - 1))
    byte = data.draw(st.integers(0, 255))
    damaged = WHOLE[:position] + bytes([byte]) + WHOLE[position + 1 :]
    with contextlib.suppress(UserError):
        decode(Message, damaged)


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        decode(State, noise)


META = "__metadata__"
NOTHING = {META: {"numbers": "{}"}}
EIGHT = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}  # right, if there were eight bytes
WRONG: list[object] = [
    None,
    [],
    EIGHT,
    {**EIGHT, "shape": [0]},
    {**EIGHT, "dtype": "F32", "data_offsets": [0, 0]},
    {**EIGHT, "data_offsets": [-8, 0]},
    {**EIGHT, "data_offsets": [0]},
    {**EIGHT, "data_offsets": "08"},
    {**EIGHT, "dtype": "F33", "shape": [0], "data_offsets": [0, 0]},
    {**EIGHT, "dtype": 4, "shape": [0], "data_offsets": [0, 0]},
    {**EIGHT, "shape": [-1, 0], "data_offsets": [0, 0]},
    {**EIGHT, "shape": [False], "data_offsets": [0, 0]},
    {**EIGHT, "shape": [0.0], "data_offsets": [0, 0]},
    {**EIGHT, "shape": [2**62, 2**62, 0], "data_offsets": [0, 0]},
    {**EIGHT, "shape": [2**70, 0], "data_offsets": [0, 0]},
    {**EIGHT, "shape": [2**40], "data_offsets": [0, 2**42]},
]


@pytest.mark.parametrize(
    "header",
    [
        {},
        {META: None},
        {META: {}},
        {META: {"numbers": "not json"}},
        {META: {"numbers": "[1]"}},
        {META: {"numbers": "3"}},
        {META: {"numbers": '{"n": "text"}'}},
        {META: {"numbers": '{"n": {"deeper": 1}}'}},
        {META: {"numbers": "[" * 100_000}},
        *({**NOTHING, "a": about} for about in WRONG),
    ],
    ids=[
        "no metadata",
        "null",
        "no numbers",
        "not json",
        "list",
        "number",
        "text inside",
        "table inside",
        "deep",
        *(str(number) for number in range(len(WRONG))),
    ],
)
def test_a_file_of_another_kind_is_refused(header: object) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        decode(Message, framed(header))


def test_nothing_is_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("pickle was used")

    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    sent = State({"a": torch.ones(3)}, {"n": [1, 2]})
    assert_same(decode(State, encode(sent)), sent)


def test_a_pickle_is_refused() -> None:
    import pickle

    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return pytest.fail, ("a pickle was loaded",)

    with pytest.raises(UserError, match="cannot be read"):
        decode(Message, pickle.dumps(Trap()))
