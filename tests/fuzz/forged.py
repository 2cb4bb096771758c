"""Inputs made to grow when they are parsed: much JSON or TOML that becomes many objects, long numbers, deep nesting."""

from __future__ import annotations

import random

from flwr.app import ConfigRecord, RecordDict
from loopback import with_encoded_message

from vitfleet.fleet.base import EvalResult, Reply
from vitfleet.flower.transport.codec import pack_reply
from vitfleet.flower.transport.payloads import HEADER
from vitfleet.message import Message

NUMBERS = '"__metadata__":{"numbers":"{}"}'
TENSOR = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
UNITS = ("[],", "{},", "0,", "999,", "1e1,", '"é",', '"":[],', "[")
CONFIGURATION_KEYS = ("model.dim", "fleet.names", "data.tasks", "plugins", "train.lr", "title", "method", "x")


def filled(unit: str, length: int) -> str:
    """Return a list of so many bytes of one element, closed unless it is nested."""
    inner = unit * (length // len(unit.encode()))
    return f"[{inner}" if unit == "[" else f"[{inner}0]"


def forged_header(rng: random.Random, length: int) -> bytes:
    """Return the header of a message, of about so many bytes."""
    kind = rng.choice(["list", "numbers", "tensors", "names", "shape", "text"])
    if kind == "list":
        text = f'{{{NUMBERS},"a":{filled(rng.choice(UNITS), length)}}}'
    elif kind == "numbers":
        samples = filled(rng.choice(UNITS[:5]), length)
        text = f'{{"__metadata__":{{"numbers":"{{\\"loss\\":1.0,\\"samples\\":{samples}}}"}}}}'
    elif kind == "tensors":
        tensors = ",".join(f'"{number:06x}":{TENSOR}' for number in range(length // 60))
        text = f"{{{NUMBERS},{tensors}}}"
    elif kind == "names":
        names = ",".join(f'\\"{number:06x}\\":1' for number in range(length // 13))
        text = f'{{"__metadata__":{{"numbers":"{{{names}}}"}}}}'
    elif kind == "shape":
        shape = filled(rng.choice(["1,", "999999,"]), length)
        text = f'{{{NUMBERS},"a":{{"dtype":"U8","shape":{shape},"data_offsets":[0,0]}}}}'
    else:  # one character beyond the first plane makes every character of a text take four bytes
        name = "\U000e0001" + "a" * length
        text = f'{{{NUMBERS},"{name}":{{"dtype":"U8","shape":[-1],"data_offsets":[0,0]}}}}'
    return text.encode()


def forged_reply(rng: random.Random, round: int, length: int, share: float) -> RecordDict:
    """Return a reply of about so many bytes, with a header that has this share of them."""
    header = forged_header(rng, int(length * share))
    encoded = len(header).to_bytes(8, "little") + header + bytes(length - int(length * share))
    record = pack_reply(Reply(0, Message(), EvalResult(1, 2)), round).config_records[HEADER]
    return with_encoded_message(RecordDict({HEADER: ConfigRecord(dict(record))}), encoded)


def forged_override(rng: random.Random, length: int) -> str:
    """Return an override of about so many characters."""
    key = rng.choice(CONFIGURATION_KEYS)
    kind = rng.choice(["list", "digits", "text", "table", "key", "parts", "points"])
    if kind == "list":
        return f"{key}={filled(rng.choice(UNITS), length)}"
    if kind == "digits":
        return f"{key}={rng.choice(['', '0x', '-', '0.', '1e'])}{'9' * length}"
    if kind == "table":
        table = ", ".join(f"a{number:06d} = 1" for number in range(length // 13))
        return f"{key}={{{table}}}"
    if kind == "points":
        return f"{key}={{{'a.' * (length // 2)}a = 1}}"
    if kind == "text":
        return f"{key}='\U000e0001{'a' * length}'"
    return "a" * length + "=1" if kind == "key" else "a." * (length // 2) + "a=1"
