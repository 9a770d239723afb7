"""The HTML page of a trajectory, opened in a real browser: right counts, switchable, usable."""

import base64
import re

import numpy as np
import pytest

from rollout.records import CheckResult, Fault, Turn, Verdict
from tests import chromium
from tests.store_data import make
from trsi_jax.report.viewer import render

needs_chromium = pytest.mark.skipif(chromium.find() is None, reason="no Chromium here")

PROMPT, WORDS = 1200, ["ls", " -la", " |", " grep", "\n", " error", "/app", " 42", "</script>", "é"]


def episode(n: int, turns: int):
    """A trajectory of n tokens: a prompt, then turns of a quarter sampled, the rest observed."""
    rng = np.random.default_rng(0)
    each = (n - PROMPT) // turns
    acted, turn = np.zeros(n, bool), np.zeros(n, np.int32)
    for t in range(turns):
        start = PROMPT + t * each
        acted[start : start + each // 4] = True
        turn[start : n if t == turns - 1 else start + each] = t
    advantage = np.where(acted, rng.normal(size=n), 0).astype(np.float32)
    columns = {
        "advantage_t": advantage,
        "value_t": np.where(acted, rng.random(n), 0).astype(np.float32),
        "reward_t": (np.arange(n) == np.flatnonzero(acted)[-1]) * np.float32(0.4375),
    }
    trajectory = make(
        "rpr-1/3/<17>",
        n,
        token_ids=rng.integers(0, len(WORDS), n).astype(np.int32),
        acted_t=acted,
        turn_t=turn,
        logprob_t=np.where(acted, -rng.exponential(size=n), 0).astype(np.float32),
        weight_version_t=np.where(acted, 7, -1).astype(np.int32),
        turns=tuple(
            Turn(f"grep {t} a.txt", "out </script><b>\x1b[2J\udce9\n" * 3, int(t == 2))
            for t in range(turns)
        ),
        verdict=Verdict((CheckResult("a", "effective", False), CheckResult("b", "guard", True))),
    )
    return trajectory, columns


def page_of(folder, n: int, turns: int, **changes):
    trajectory, columns = episode(n, turns)
    path = folder / "page.html"
    path.write_text(render(trajectory, columns, token_text=lambda i: WORDS[i], **changes))
    return path, trajectory, columns


def test_the_page_stands_alone_and_holds_nothing_that_is_obeyed(tmp_path) -> None:
    path, _, _ = page_of(tmp_path, 2000, 4, instruction="count <b>errors</b>")
    text = path.read_text()
    assert not re.search(r"https?://|<link|<img|@import|url\(", text)
    assert text.count("</script>") == 2  # its own two
    assert "<b>errors" not in text
    assert "\x1b" not in text


def test_a_fault_is_shown_as_masked(tmp_path) -> None:
    fault = make("a", verdict=None, fault=Fault("sandbox-dead", "<gone>"), finish="fault")
    text = render(fault, {})
    assert "sandbox-dead</b>: &lt;gone&gt;" in text
    assert "masked" in text


@needs_chromium
def test_counts_colours_and_numbers_are_those_of_the_record(tmp_path) -> None:
    path, trajectory, columns = page_of(tmp_path, 2000, 4, instruction="count errors")
    acted = np.flatnonzero(trajectory.acted_t)
    with chromium.Page(path.as_uri(), tmp_path / "profile") as page:
        for name, value in (
            ("turns", "4"),
            ("tokens", "2,000"),
            ("sampled", str(acted.size)),
            ("reward", "0.438"),
            ("checks", "1 / 2"),
        ):
            assert page.run(f"document.querySelector('#n-{name}').textContent") == value
        assert page.run("document.querySelectorAll('.turn').length") == 5  # and the prompt
        assert page.run("document.querySelectorAll('pre.command').length") == 4
        # The text of all blocks together is the text of all tokens.
        shown = page.run(
            "[...document.querySelectorAll('.block')].map(b => b.textContent).join('')"
        )
        assert shown == "".join(WORDS[i] for i in trajectory.token_ids)
        # A positive and a negative advantage are of different colours, an observation of none.
        page.run("document.querySelectorAll('details').forEach(d => d.open = true)")
        a = columns["advantage_t"]
        places = [int(acted[a[acted] > 0.5][0]), int(acted[a[acted] < -0.5][0]), PROMPT + 150]

        def colours(mode: str) -> list[str]:
            page.run(f"show('{mode}')")
            return [
                page.run(f"seek({i}), document.querySelector('[data-i=\"{i}\"]').style.background")
                for i in places
            ]

        plus, minus, none = colours("advantage")
        assert ("--plus" in plus, "--minus" in minus, none) == (True, True, "")
        seen = {mode: tuple(colours(mode)) for mode in ("advantage", "value", "mask", "none")}
        assert len(set(seen.values())) == 4
        assert set(seen["none"]) == {""}
        for mode in ("advantage", "value", "mask", "log-prob"):
            page.run(f"show('{mode}')")
            assert page.run("document.querySelector('#legend').textContent.length") > 5
        # Hovering a token shows its numbers.
        tip = page.run(
            f"(s => {{ s.dispatchEvent(new MouseEvent('mousemove', {{bubbles: true}}));"
            f" return document.querySelector('#tip').textContent }})"
            f"(document.querySelector('[data-i=\"{places[0]}\"]'))"
        )
        assert f"{trajectory.logprob_t[places[0]]:.4f}" in tip
        assert f"{a[places[0]]:.5g}"[:5] in tip
        assert page.errors == []
        assert all(url.startswith(("file:", "about:", "data:")) for url in page.requests)


@needs_chromium
def test_96000_tokens_stay_usable(tmp_path) -> None:
    path, trajectory, _ = page_of(tmp_path, 96_000, 60)
    with chromium.Page(path.as_uri(), tmp_path / "profile") as page:
        assert page.run("document.querySelector('#n-tokens').textContent") == "96,000"
        drawn = "document.querySelectorAll('.block span').length"
        wait = "new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))"
        page.run(wait)
        counts = []
        for share in (0.0, 0.3, 0.6, 0.9, 1.0, 0.1):
            page.run(f"scrollTo(0, document.body.scrollHeight * {share}), {wait}")
            page.run("new Promise(r => setTimeout(r, 150))")
            counts.append(page.run(drawn))
        # Elements exist for what is near the screen alone, wherever one scrolls.
        assert 0 < max(counts) < 12_000, counts
        # Switching the colour repaints these: far below what a person notices.
        took = page.run("(t => { show('value'); return performance.now() - t })(performance.now())")
        assert took < 1000, f"{took} ms to switch colours"
        last = int(np.flatnonzero(trajectory.acted_t)[-1])
        page.run(f"seek({last})")
        page.run(wait)
        box = page.run(f"document.querySelector('[data-i=\"{last}\"]').getBoundingClientRect().top")
        assert 0 <= box <= 900, "the last sampled token is on the screen"
        picture = page.call("Page.captureScreenshot", format="png")["data"]
        (tmp_path / "page.png").write_bytes(base64.b64decode(picture))
        assert page.errors == []
