"""A runner that fails in any of its methods ends those concerned and no others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from clients import INFO, OTHERS, TARGET, TIGHT, answer_of, ask, lone, options, start
from null_runner import NullRunner, null_info

from hybridtrt.plugins.step import StepBatch
from hybridtrt.runtime.engine import Engine
from hybridtrt.runtime.runner import RunnerInfo
from hybridtrt.runtime.scheduler import Plan


class Broken(NullRunner):
    """Fails at some call of one method."""

    def __init__(self, info: RunnerInfo, method: str, call: int) -> None:
        super().__init__(info)
        self.method, self.left, self.broke = method, call, False

    def _count(self, method: str) -> None:
        if method == self.method and not self.broke:
            self.left -= 1
            if self.left < 0:
                self.broke = True
                raise OSError(f"{method} is broken\nand more")

    def clear_slots(self, slots: Sequence[int]) -> None:
        self._count("clear_slots")
        super().clear_slots(slots)

    def copy_pages(self, copies: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        self._count("copy_pages")
        super().copy_pages(copies)

    def save(self, pages: Mapping[str, Sequence[int]], slots: Sequence[int]) -> Any:
        self._count("save")
        return super().save(pages, slots)

    def restore(self, saved: Any, pages: Mapping[str, Sequence[int]], slots: Sequence[int]) -> None:
        self._count("restore")
        super().restore(saved, pages, slots)

    def step(self, batch: StepBatch) -> Any:
        self._count("step")
        return super().step(batch)


@pytest.mark.parametrize("method", ["clear_slots", "copy_pages", "save", "restore", "step"])
def test_a_runner_that_fails_ends_those_concerned_and_no_others(method: str) -> None:
    info = TIGHT if method in ("save", "restore") else null_info(vocab_size=20, max_num_tokens=8)
    requests = (*OTHERS, TARGET, replace(TARGET, id="again"))
    broke = 0
    for call in range(4):
        runner = Broken(info, method, call)
        engine = Engine(runner, options=options(policy="max_utilization", swap_bytes=1000, enable_block_reuse=False))
        concerned = watch(engine)
        client = start(engine, *requests)
        while engine.has_work:
            had_broken = runner.broke
            outputs = client.step()
            failed = {f"{output.request_id}/{output.index}" for output in outputs if output.finish_reason == "error"}
            if had_broken == runner.broke:
                assert not failed
                continue
            broke += 1
            assert all(output.error == f"OSError: {method} is broken" for output in outputs if output.error)
            if method == "copy_pages":
                (follower,) = failed
                assert not follower.endswith("/0")
            else:
                assert failed == concerned
        client.run()
        for request in requests:
            for result, expected in zip(client.results(request.id), lone(request, info), strict=True):
                assert answer_of(result) == expected or result.finish_reason == "error"
                assert list(result.token_ids) == expected.token_ids[: len(result.token_ids)]
    assert broke >= 2


def watch(engine: Engine) -> set[str]:
    """The names of the answers in the last plan, and of those that begin with the prompt of one of them."""
    names: set[str] = set()
    schedule: Callable[[], Plan] = engine._scheduler.schedule

    def watched() -> Plan:
        plan = schedule()
        names.clear()
        for sequence in (*plan.sequences, *plan.swapped_out):
            names.update(answer.name for answer in (sequence, *sequence.followers))
        return plan

    engine._scheduler.schedule = watched  # type: ignore[method-assign]
    return names


def test_states_of_a_step_that_failed_are_not_reused() -> None:
    """Four tokens have been computed when it fails, a page."""
    engine = Engine(NullRunner(INFO), options=options())
    client = start(engine, ask("lost", (1, 2, 3)))
    client.step()
    client.step()
    engine._runner.on_step = fail  # type: ignore[attr-defined]
    (lost,) = (output for output in client.step() if output.finish_reason)
    engine._runner.on_step = None  # type: ignore[attr-defined]
    assert lost.error == "OSError: broken"
    again = ask("again", (1, 2, 3, *client.results("lost")[0].token_ids, 7))
    engine.submit(again)
    client.run()
    assert client.is_lone(again)
    assert engine.statistics()["hit_tokens"] == 0


def fail(batch: StepBatch) -> None:
    raise OSError("broken")
