"""Predictions from the layers of the step that is under way."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpipe import _kvpipe
from kvpipe.control import ControlClient
from kvpipe.vllm.handoff.metadata import PrefillRest, StepMetadata
from kvpipe.vllm.handoff.producer.progress import Progress, StepPace
from tests.vllm.handoff import test_worker
from tests.vllm.handoff.engine import new_id

pytestmark = pytest.mark.vllm


def saved(pace: StepPace, *times_s: float) -> float | None:
    left_s = None
    for now_s in times_s:
        left_s = pace.layer_saved(now_s)
    return left_s


def test_what_is_left_of_a_step_is_its_layers_at_the_pace_of_the_last_ones() -> None:
    pace = StepPace(16, began_s=0.1)
    assert saved(pace, 0.1, 0.3, 0.4) is None
    assert saved(pace, 0.44) == pytest.approx(13 * 0.1)
    assert saved(pace, 0.48, 0.52) == pytest.approx(11 * 0.04)


def test_a_delayed_layer_does_not_change_the_pace() -> None:
    pace = StepPace(16, began_s=0.0)
    assert saved(pace, 0.0, 0.04, 0.08, 0.12) == pytest.approx(13 * 0.04)
    assert saved(pace, 0.5) == pytest.approx(12 * 0.04)


@pytest.mark.parametrize(("first_s", "left_s"), [(0.0, 0.1), (0.04, 0.06), (0.1, 0.0), (0.3, 0.0)])
def test_after_the_last_layers_attention_that_part_of_a_layer_is_left_which_the_first_one_did_not_have(
    first_s: float, left_s: float
) -> None:
    pace = StepPace(4, began_s=1.0)
    assert saved(pace, *(1.0 + first_s + 0.1 * layer for layer in range(4))) == pytest.approx(left_s)


def test_more_layers_than_a_step_has_leave_no_negative_time() -> None:
    assert saved(StepPace(4, began_s=0.0), 0.1, 0.2, 0.3, 0.4, 0.5, 0.6) == pytest.approx(0)


class Scene:
    """An engine's control port with an open handoff, and a client that subscribes to the end of its prefill."""

    def __init__(self) -> None:
        self.port = _kvpipe.Control("127.0.0.1:0", b"", "p")
        self.client = ControlClient("")
        self.handoff = bytes.fromhex(new_id())
        self.port.open(self.handoff, bytes(32), 100, [])

    def subscribed(self, lead_s: float) -> Any:
        work = self.client.subscribe(self.port.address, self.handoff.hex(), lead_s)
        self.client.describe(self.port.address).wait(5)
        return work

    def step(self, beyond_s: float = 0.0) -> StepMetadata:
        return StepMetadata(progress=[PrefillRest(self.handoff, beyond_s)], control=str(self.port.address))

    def close(self) -> None:
        self.client.close()
        self.port.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.close()


def layers(progress: Progress, step: StepMetadata, pace_s: float = 100.0) -> None:
    progress.begin_step(step, 16, 0.0)
    for index in range(8):
        progress.layer_saved(index * pace_s)


def test_the_end_of_a_step_is_reported_to_the_control_port_during_the_step(scene: Scene) -> None:
    progress = Progress("p")
    work = scene.subscribed(1350.0)
    layers(progress, scene.step())
    moment = work.wait(5)
    assert moment.kind == "due"
    assert moment.remaining_s == pytest.approx(1300.0, abs=5)
    progress.close()


def test_what_a_prefill_takes_beyond_the_step_is_added(scene: Scene) -> None:
    progress = Progress("p")
    work = scene.subscribed(2000.0)
    layers(progress, scene.step(1500.0), pace_s=20.0)
    assert work.wait(5).remaining_s == pytest.approx(1500 + 9 * 20, abs=90)
    progress.close()


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Reported remaining seconds, in place of the control port."""
    reports: list[float] = []
    monkeypatch.setattr(Progress, "_report", lambda _, step, left_s: reports.append(left_s))
    return reports


def saved_layers(progress: Progress, *paces_s: float) -> None:
    now_s = 0.0
    for pace_s in paces_s:
        now_s += pace_s
        progress.layer_saved(now_s)


def test_a_prediction_is_reported_again_when_it_has_moved_or_half_of_it_is_over(
    scene: Scene, reports: list[float]
) -> None:
    progress = Progress("p")
    progress.begin_step(scene.step(), 16, 0.0)
    saved_layers(progress, *[0.05] * 8)
    assert reports == [pytest.approx(12 * 0.05)], "it was steady"
    progress.begin_step(scene.step(), 16, 0.0)
    saved_layers(progress, *[0.05] * 7)
    assert reports[1:] == [pytest.approx(12 * 0.05)], "a new step is news"
    progress.begin_step(scene.step(), 16, 0.0)
    saved_layers(progress, *[0.05] * 5, 0.08, 0.08)
    assert reports[2:] == [pytest.approx(12 * 0.05), pytest.approx(9 * 0.08 + 0.03)], "it has moved"
    progress.begin_step(scene.step(), 16, 0.0)
    saved_layers(progress, *[0.05] * 9)
    assert reports[4:] == [pytest.approx(12 * 0.05)], "more than half of it is left"
    progress.layer_saved(10 * 0.05)
    assert reports[5:] == [pytest.approx(6 * 0.05)]


def test_a_prediction_that_has_moved_by_less_than_5_ms_is_not_reported_again(
    scene: Scene, reports: list[float]
) -> None:
    progress = Progress("p")
    progress.begin_step(scene.step(), 16, 0.0)
    saved_layers(progress, *[0.001] * 5, 0.0012, 0.0012)
    assert reports == [pytest.approx(12 * 0.001)]


def test_only_the_first_rank_reports_and_only_steps_with_prefills(scene: Scene) -> None:
    silent, idle = Progress("p", is_silent=True), Progress("p")
    layers(silent, scene.step())
    layers(idle, StepMetadata())
    assert (silent._client, idle._client) == (None, None)


def test_a_prediction_that_cannot_be_reported_does_not_fail_the_forward_pass(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVPIPE_TOKEN_FILE", str(tmp_path / "removed"))
    progress = Progress("p")
    layers(progress, scene.step())
    monkeypatch.delenv("KVPIPE_TOKEN_FILE")
    layers(progress, scene.step())
    assert progress._client is None, "it was tried again in the middle of a step"


def test_a_worker_times_its_steps_by_the_monotonic_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    begun_s: list[float] = []
    monkeypatch.setattr(Progress, "begin_step", lambda _, step, num_layers, now_s: begun_s.append(now_s))
    pair = test_worker.Pair()
    before_s = time.monotonic()
    pair.begin_step([2, 3])
    assert [before_s <= now_s <= time.monotonic() for now_s in begun_s] == [True]
    pair.producer.close()
    pair.consumer.close()


def test_nothing_is_predicted_of_a_handoff_that_is_not_open(scene: Scene) -> None:
    asker = _kvpipe.Control(None, b"", "p")
    for handoff, answer in ((scene.handoff, True), (bytes.fromhex(new_id()), False)):
        work = asker.report_progress(str(scene.port.address), handoff, 1.0, 5.0)
        work.wait(5.0)
        assert work.result() is answer
    asker.close()
