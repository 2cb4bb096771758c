"""Mutations of a client's reply: of its tensors, of its numbers, of its header, of its bytes."""

from __future__ import annotations

import json
import random
from typing import Any

import torch
from flwr.app import ConfigRecord, RecordDict
from loopback import with_encoded_message
from torch import Tensor

from vitfleet.fleet.base import Reply
from vitfleet.flower.transport.codec import pack_reply
from vitfleet.flower.transport.payloads import HEADER
from vitfleet.message import Message
from vitfleet.wire import safetensors_chunks

SCALES = (1e-30, 0.0, -1.0, 3.0, 1e3, 1e6, 1e30, float("nan"), float("inf"))
SCALARS: tuple[Any, ...] = (
    *(0, 1, 3, -1, 7, 10**3, 2**31, 2**53, 2**63, 10**400, True, False, None, "3", {}),
    *(0.0, 0.5, -2.5, 1e-300, 1e300, float("nan"), float("inf")),
)


def mutated_reply(reply: Reply, round: int, rng: random.Random) -> RecordDict:
    """Return a reply as the content of a Flower message, with one to three mutations."""
    assert reply.message is not None
    tensors, numbers = dict(reply.message.tensors), dict[str, Any](reply.message.numbers)
    header = dict[str, Any](pack_reply(Reply(0, Message({}, {}), reply.evaluation), round).config_records[HEADER])
    flips = 0
    for _ in range(rng.randint(1, 3)):
        kind = rng.choice(["tensor", "tensor", "number", "number", "number", "header", "bytes"])
        if kind == "tensor":
            _mutate_tensors(tensors, rng)
        elif kind == "number":
            _mutate_numbers(numbers, rng)
        elif kind == "header":
            header[rng.choice([*header, "other"])] = rng.choice([0, -1, 3, 2**60, 0.5, "x", [1, 2], True])
        else:
            flips = rng.randint(1, 4)
    metadata = {"numbers": json.dumps(numbers)}
    encoded = bytearray(b"".join(safetensors_chunks(tensors, metadata)))
    for _ in range(flips):
        encoded[rng.randrange(len(encoded))] ^= 1 << rng.randrange(8)
    if flips and rng.random() < 0.3:
        del encoded[rng.randrange(len(encoded)) :]
    return with_encoded_message(RecordDict({HEADER: ConfigRecord(header)}), bytes(encoded))


def _mutate_tensors(tensors: dict[str, Tensor], rng: random.Random) -> None:
    if not tensors or rng.random() < 0.1:
        tensors[rng.choice(["", "features", "labels", "scales", "head.weight", "../x", "é"])] = torch.ones(3)
        return
    name = rng.choice(sorted(tensors))
    tensor = tensors[name].clone()
    action = rng.choice(["drop", "rename", "scale", "element", "type", "shape", "random", "copy"])
    if action in ("drop", "rename"):
        del tensors[name]
    if action == "rename":
        tensors[f"{name}.x"] = tensor
    elif action == "scale" and tensor.is_floating_point():
        tensors[name] = tensor * rng.choice(SCALES)
    elif action == "element" and tensor.numel():
        flat = tensor.flatten()
        flat[rng.randrange(len(flat))] = rng.choice([2, 100, -7]) if not tensor.is_floating_point() else 1e6
        tensors[name] = flat.reshape(tensor.shape)
    elif action == "type":
        tensors[name] = tensor.to(rng.choice([torch.float64, torch.int8, torch.bool, torch.bfloat16, torch.int64]))
    elif action == "shape":
        tensors[name] = rng.choice([tensor.flatten(), tensor[None], tensor[..., :0], tensor.flatten()[:1]])
    elif action == "random":
        data = rng.randbytes(tensor.numel() * tensor.element_size())
        if data:
            tensors[name] = torch.frombuffer(bytearray(data), dtype=tensor.dtype).reshape(tensor.shape)
    elif action == "copy":
        tensors[name] = tensors[rng.choice(sorted(tensors))]


def _mutate_numbers(numbers: dict[str, Any], rng: random.Random) -> None:
    name = rng.choice([*sorted(numbers), "other", "stored", "layers", "a" * 1000])
    action = rng.choice(["drop", "scalar", "scalar", "list", "item", "longer", "shorter", "nested"])
    value = numbers.get(name)
    if action == "drop":
        numbers.pop(name, None)
    elif action == "scalar":
        numbers[name] = rng.choice(SCALARS)
    elif action == "list":
        numbers[name] = [rng.choice(SCALARS) for _ in range(rng.choice([0, 1, 2, 5, 70]))]
    elif action == "nested":
        numbers[name] = [[1], [2]]
    elif isinstance(value, list) and value:
        changed = list(value)
        if action == "item":
            changed[rng.randrange(len(changed))] = rng.choice(SCALARS)
        numbers[name] = changed + changed if action == "longer" else changed[:-1] if action == "shorter" else changed


def content_bytes(content: RecordDict) -> int:
    """Return the number of bytes that a client sent."""
    values = [value for record in content.config_records.values() for value in record.values()]
    return sum(len(value) if isinstance(value, bytes) else len(str(value)) for value in values)
