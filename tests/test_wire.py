"""Serialisation: payloads are restored exactly, their size is known beforehand, damage is rejected."""

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
    decode_received,
    encode,
    encode_chunks,
    encoded_size,
    read_payload,
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

# Names that JSON has to escape, and names with more bytes than characters.
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


def assert_same(actual: Payload, expected: Payload) -> None:
    assert actual.tensors.keys() == expected.tensors.keys()
    for name, tensor in actual.tensors.items():
        assert expected.tensors[name].dtype == tensor.dtype
        assert expected.tensors[name].shape == tensor.shape
        assert torch.equal(expected.tensors[name], tensor)
    assert actual.numbers.keys() == expected.numbers.keys()
    for key, value in actual.numbers.items():
        assert_same_number(expected.numbers[key], value)


def assert_same_number(actual: Number, expected: Number) -> None:
    assert type(actual) is type(expected)
    if isinstance(actual, list) and isinstance(expected, list):
        assert len(actual) == len(expected)
        for actual_item, expected_item in zip(actual, expected, strict=True):
            assert_same_number(actual_item, expected_item)
    elif isinstance(actual, float) and isinstance(expected, float):
        assert struct.pack("<d", actual) == struct.pack("<d", expected) or (math.isnan(actual) and math.isnan(expected))
    else:
        assert actual == expected


def file_with_header(header: object, payload: bytes = b"") -> bytes:
    """Return a file in the format with any header."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + payload


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode_restores_tensors_exactly(dtype: torch.dtype) -> None:
    sent = Message({f"tensor {shape}": sample(dtype, shape) for shape in SHAPES})
    assert_same(decode(Message, encode(sent)), sent)


@given(messages)
@settings(deadline=None)
def test_decode_restores_any_message(sent: Message) -> None:
    assert_same(decode(Message, encode(sent)), sent)


@given(messages)
@settings(deadline=None)
def test_encode_writes_the_safetensors_format(sent: Message) -> None:
    """The bytes are those that the safetensors library writes, and it can read them."""
    copies = {name: tensor.clone() for name, tensor in sent.tensors.items()}
    numbers = json.dumps(dict(sent.numbers), separators=(",", ":"))
    assert encode(sent) == save(copies, {"numbers": numbers})
    assert_same(Message(load(encode(sent)), sent.numbers), sent)


@given(messages, st.integers(1, 300))
@settings(deadline=None)
def test_encode_chunks_yields_the_bytes_of_encode(sent: Message, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "CHUNK", size)
        chunks = list(encode_chunks(sent))
    assert b"".join(chunks) == encode(sent)
    assert all(len(chunk) == size for chunk in chunks[:-1])
    assert 0 < len(chunks[-1]) <= size
    assert_same(decode_chunks(Message, iter(chunks), len(encode(sent))), sent)


def test_write_payload_writes_the_bytes_of_encode(tmp_path: Path) -> None:
    sent = State({"a": torch.randn(3, 5), "b": torch.ones(2, dtype=torch.int64)}, {"n": 1})
    write_payload(tmp_path / "state", sent)
    assert (tmp_path / "state").read_bytes() == encode(sent)
    assert_same(read_payload(State, tmp_path / "state"), sent)


def test_decode_chunks_frees_chunks_while_it_reads() -> None:
    """All chunks and all tensors of a large message are never in memory at the same time."""
    sent = Message({str(index): torch.full((2**20,), float(index)) for index in range(4)})  # 4 MiB each
    chunks, remaining = list(encode_chunks(sent)), []

    def pop_chunks() -> Iterator[bytes]:
        chunks.reverse()
        while chunks:
            remaining.append(len(chunks))
            yield chunks.pop()

    assert_same(decode_chunks(Message, pop_chunks(), encoded_size(sent)), sent)
    assert remaining == list(range(17, 0, -1))


@given(messages)
@example(Message())
@example(Message(numbers={"loss": 0.1, "order": [3, 1, 2]}))
@example(Message({"a": torch.zeros(99), "b": torch.zeros(1, dtype=torch.int64), "é": torch.zeros(())}))
@settings(deadline=None, max_examples=300)
def test_encoded_size_is_the_length_of_encode(sent: Message) -> None:
    assert encoded_size(sent) == len(encode(sent))


def test_encoded_size_of_a_model() -> None:
    weights = {f"blocks.{i}.mlp.fc{j}.weight": torch.zeros(64, 16) for i in range(12) for j in (1, 2)}
    sent = State({**weights, "steps": torch.zeros(3, dtype=torch.int64)}, {"samples": 500, "loss": 1 / 3})
    assert encoded_size(sent) == len(encode(sent))
    assert sent.num_bytes == 24 * 64 * 16 * 4 + 3 * 8


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
def test_encode_copies_the_values_of_views(tensor: Tensor) -> None:
    sent = Message({"tensor": tensor})
    decoded = decode(Message, encode(sent)).tensors["tensor"]
    assert torch.equal(decoded, tensor.detach())
    assert not decoded.requires_grad
    assert encoded_size(sent) == len(encode(sent))
    assert len(encode(sent)) == len(encode(Message({"tensor": tensor.detach().clone()})))  # not the whole storage


def test_encode_copies_the_values_of_tensors_that_share_memory() -> None:
    """A state may hold one tensor under two names (an anchor and the weights before the first step)."""
    weights = torch.arange(6.0)
    sent = State({"weights": weights, "anchor": weights, "part": weights[2:5]})
    assert_same(decode(State, encode(sent)), sent)
    assert encoded_size(sent) == len(encode(sent))


INTEGERS = [0, -1, 2**63, 2**80]
FLOATS = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, 1.0, math.inf, -math.inf, math.nan]
LISTS = [[], [1, 2, 3], [0.1, 1.0, math.nan], list(range(1000))]


@pytest.mark.parametrize("value", [*INTEGERS, *FLOATS, *LISTS], ids=lambda value: str(value)[:20])
def test_decode_restores_numbers_exactly(value: Number) -> None:
    assert_same_number(decode(Message, encode(Message(numbers={"n": value}))).numbers["n"], value)


@pytest.mark.parametrize("payload_type", [Payload, Message, State])
def test_decode_returns_the_requested_type(payload_type: type[Payload]) -> None:
    assert type(decode(payload_type, encode(payload_type({"a": torch.ones(2)}, {"b": 1})))) is payload_type


def test_decoded_tensors_are_writable() -> None:
    data = encode(Message({"a": torch.zeros(4)}))
    decode(Message, data).tensors["a"].add_(1)
    assert torch.equal(decode(Message, data).tensors["a"], torch.zeros(4))


def test_encode_does_not_depend_on_the_order_of_tensors() -> None:
    first = Message({"b": torch.ones(2), "a": torch.zeros(3)}, {"n": 1})
    second = Message({"a": torch.zeros(3), "b": torch.ones(2)}, {"n": 1})
    assert encode(first) == encode(second)


VALID = encode(Message({"a": torch.arange(5.0), "b": torch.ones(2, dtype=torch.int64)}, {"samples": 3}))


def test_decode_rejects_truncated_bytes() -> None:
    for length in range(len(VALID)):
        with pytest.raises(UserError, match=f"message of {length} bytes cannot be read"):
            decode(Message, VALID[:length])


@given(st.data())
@settings(deadline=None, max_examples=300)
def test_decode_of_a_damaged_header_raises_user_error_or_returns(data: st.DataObject) -> None:
    """No damage of the header raises any other error."""
    end = 8 + int.from_bytes(VALID[:8], "little")
    position = data.draw(st.integers(0, end - 1))
    byte = data.draw(st.integers(0, 255))
    damaged = VALID[:position] + bytes([byte]) + VALID[position + 1 :]
    with contextlib.suppress(UserError):
        decode(Message, damaged)


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_decode_rejects_random_bytes(noise: bytes) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        decode(State, noise)


META = "__metadata__"
NO_NUMBERS = {META: {"numbers": "{}"}}
ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}  # valid for a file with eight bytes of data
INVALID_ENTRIES: list[object] = [
    None,
    [],
    ENTRY,
    {**ENTRY, "shape": [0]},
    {**ENTRY, "dtype": "F32", "data_offsets": [0, 0]},
    {**ENTRY, "data_offsets": [-8, 0]},
    {**ENTRY, "data_offsets": [0]},
    {**ENTRY, "data_offsets": "08"},
    {**ENTRY, "dtype": "F33", "shape": [0], "data_offsets": [0, 0]},
    {**ENTRY, "dtype": 4, "shape": [0], "data_offsets": [0, 0]},
    {**ENTRY, "shape": [-1, 0], "data_offsets": [0, 0]},
    {**ENTRY, "shape": [False], "data_offsets": [0, 0]},
    {**ENTRY, "shape": [0.0], "data_offsets": [0, 0]},
    {**ENTRY, "shape": [2**62, 2**62, 0], "data_offsets": [0, 0]},
    {**ENTRY, "shape": [2**70, 0], "data_offsets": [0, 0]},
    {**ENTRY, "shape": [2**40], "data_offsets": [0, 2**42]},
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
        *({**NO_NUMBERS, "a": entry} for entry in INVALID_ENTRIES),
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
        *(str(number) for number in range(len(INVALID_ENTRIES))),
    ],
)
def test_decode_rejects_invalid_headers(header: object) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        decode(Message, file_with_header(header))


@pytest.mark.parametrize(("header_bytes", "accepted"), [(10**5, True), (3 * 10**5, False)])
def test_the_header_of_a_received_message_is_limited(header_bytes: int, accepted: bool) -> None:
    message = Message({"weight": torch.zeros(100)}, {"list": [1] * (header_bytes // 2)})
    assert decode(Message, encode(message)) is not None  # what this machine wrote itself has no such limit
    with contextlib.nullcontext() if accepted else pytest.raises(UserError, match="header is too long"):
        decode_received(Message, encode_chunks(message), encoded_size(message))


def test_a_long_header_is_accepted_in_a_large_message() -> None:
    message = Message({"weight": torch.zeros(2 * 10**6)}, {"list": [1] * 150_000})
    assert decode_received(Message, encode_chunks(message), encoded_size(message)).numbers == message.numbers


def test_decode_rejects_a_shape_of_many_dimensions() -> None:
    """The product of many sizes is a number that takes minutes to compute."""
    entry = {"dtype": "U8", "shape": [999_999] * 10**5 + [0], "data_offsets": [0, 0]}
    header = json.dumps({"__metadata__": {"numbers": "{}"}, "a": entry}).encode()
    with pytest.raises(UserError, match="the shape or the offsets of 'a' are not valid"):
        decode(Message, struct.pack("<Q", len(header)) + header)


def test_encode_and_decode_do_not_use_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("pickle was used")

    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, fail)
    sent = State({"a": torch.ones(3)}, {"n": [1, 2]})
    assert_same(decode(State, encode(sent)), sent)


def test_decode_does_not_load_a_pickle() -> None:
    import pickle

    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return pytest.fail, ("a pickle was loaded",)

    with pytest.raises(UserError, match="cannot be read"):
        decode(Message, pickle.dumps(Trap()))
