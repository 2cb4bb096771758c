"""The demo page in a real browser, its server, and the attention rollout that it shows."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import vitfleet
from browser import CHROMIUM, chromium
from made_photos import draw_photos
from vitfleet.api.models import demo_server
from vitfleet.demo.server import DemoServer
from vitfleet.inference.attention import attention_rollout


@pytest.fixture
def server(photo_run: vitfleet.Run) -> Iterator[DemoServer]:
    """Return the demo of a run, serving in a thread."""
    with demo_server(photo_run) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def request(server: DemoServer, method: str, path: str, body: bytes = b"", host: str = "") -> tuple[int, bytes]:
    name, port = server.server_address[:2]
    connection = http.client.HTTPConnection(str(name), int(port), timeout=60)
    connection.request(method, path, body, {"Host": host} if host else {})
    reply = connection.getresponse()
    return reply.status, reply.read()


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (Debian: apt-get install chromium)")
def test_image_dropped_on_the_page_is_predicted_by_three_models(
    server: DemoServer, photo_run: vitfleet.Run, tmp_path: Path
) -> None:
    draw_photos(tmp_path, ("sea",), 1)
    photo, broken = tmp_path / "sea" / "0.png", tmp_path / "broken.jpg"
    broken.write_bytes(b"no image")
    with chromium(tmp_path / "profile") as browser:
        for width, dark in ((400, True), (1200, False)):
            browser.open(server.address, width, dark=dark)
            browser.wait_for("document.querySelector('#title').textContent.startsWith('EFTViT on')")
            browser.drop_file("#drop", photo)
            browser.wait_for("document.querySelectorAll('.card').length === 3")
            assert browser.value("document.documentElement.scrollWidth") == width  # nothing overflows
        titles = browser.value("[...document.querySelectorAll('.card h2')].map((title) => title.textContent)")
        assert titles == ["server's model", "client 0's model", "client 1's model"]
        shown = browser.value("[...document.querySelectorAll('.best')].map((row) => row.textContent)")
        for text, client in zip(shown, (None, 0, 1), strict=True):
            (image,) = vitfleet.predict(photo_run, [photo], client=client)
            assert image.prediction is not None
            assert text == f"{image.prediction.label}{100 * image.prediction.probability:.1f} %"
        assert browser.value("[...document.querySelectorAll('.overlay')].every((image) => image.naturalWidth === 320)")
        browser.value("const o = document.querySelector('#opacity'); o.value = 20; o.dispatchEvent(new Event('input'))")
        assert browser.value("document.querySelector('.overlay').style.opacity") == "0.2"
        assert browser.errors == []
        browser.drop_file("#drop", broken)
        browser.wait_for("document.querySelector('#error').textContent !== ''")
        assert "broken.jpg: this is not an image that can be read" in browser.value(
            "document.querySelector('#error').textContent"
        )
        assert browser.value("document.querySelectorAll('.card').length") == 0


def test_server_answers_this_machine_only(server: DemoServer) -> None:
    assert server.address.startswith("http://127.0.0.1:")
    assert request(server, "GET", "/")[0] == 200
    assert request(server, "GET", "/", host="evil.example:80")[0] == 403
    assert request(server, "GET", "/../config.json")[0] == 404
    status, body = request(server, "POST", "/predict", b"not an image")
    assert (status, "not an image" in json.loads(body)["error"]) == (422, True)


def rollout_by_hand(model: Any, images: torch.Tensor) -> torch.Tensor:
    """Return the rollout of one image, token by token, from the weights alone."""
    vit, weights = model.vit, model.vit.state_dict()
    with torch.inference_mode():
        tokens = vit.embed(model.preprocess(images))[0]
        rollout = torch.eye(len(tokens))
        heads = vit.blocks[0].attn.num_heads
        for index, block in enumerate(vit.blocks):
            normed = block.norm1(tokens)
            qkv = normed @ weights[f"blocks.{index}.attn.qkv.weight"].T + weights[f"blocks.{index}.attn.qkv.bias"]
            query, key, _ = qkv.chunk(3, dim=1)
            width = query.shape[1] // heads
            attention = torch.zeros(len(tokens), len(tokens))
            for head in range(heads):
                part = slice(head * width, (head + 1) * width)
                for row in range(len(tokens)):
                    scores = torch.stack([query[row, part] @ other for other in key[:, part]]) / width**0.5
                    attention[row] += scores.softmax(dim=0) / heads
            rollout = (attention + torch.eye(len(tokens))) / 2 @ rollout
            tokens = block(tokens[None])[0]
    shares = rollout[0, 1:]  # of the class token
    return shares / shares.sum()


def test_rollout_is_the_product_of_the_attention_matrices(photo_run: vitfleet.Run) -> None:
    model = photo_run.model(client=0)
    images = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    rollout = attention_rollout(model, images)
    assert rollout is not None
    assert rollout.shape == (2, 4, 4)
    torch.testing.assert_close(rollout[1].flatten(), rollout_by_hand(model, images[1:]), atol=1e-5, rtol=1e-4)
