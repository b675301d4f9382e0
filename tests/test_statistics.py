"""Counters, histograms and the snapshot of an engine."""

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hybridtrt.runtime.statistics import BOUNDS, Histogram, Recorder, RequestTimes, Usage, snapshot

SECONDS = st.one_of(st.sampled_from(BOUNDS), st.floats(0, 1000))


@given(st.lists(SECONDS))
def test_a_histogram_counts_what_numpy_counts(values):
    """Buckets as in Prometheus: a value that equals a bound is below it. The oracle's buckets are open there."""
    histogram = Histogram()
    for value in values:
        histogram.observe(value)
    expected, _ = np.histogram(np.negative(values), [-np.inf, *np.negative(BOUNDS)[::-1], np.inf])
    assert histogram.counts == expected[::-1].tolist()
    assert np.isclose(histogram.sum, sum(values))


def recorder_at(now):
    return Recorder(lambda: now)


def counted(recorder):
    return {name: (sum(histogram.counts), histogram.sum) for name, histogram in recorder.histograms.items()}


def test_a_complete_answer_is_timed_from_submission_to_its_last_token():
    recorder = recorder_at(22.0)
    recorder.finished(RequestTimes(10.0, 12.0, 13.0), 4, "length")
    assert counted(recorder) == {
        "queue": (1, 2.0), "first_token": (1, 3.0), "per_output_token": (1, 3.0), "end_to_end": (1, 12.0)
    }  # fmt: skip
    assert recorder.counters.finished["length"] == 1


def test_what_did_not_happen_is_not_observed():
    """One token has no gap to the next; a request that waits when it ends has no queue time, and so on."""
    recorder = recorder_at(22.0)
    recorder.finished(RequestTimes(10.0), 0, "cancelled")
    assert counted(recorder) == dict.fromkeys(recorder.histograms, (0, 0.0))
    recorder.finished(RequestTimes(10.0, 12.0), 0, "error")
    assert counted(recorder)["queue"] == (1, 2.0)
    recorder.finished(RequestTimes(10.0, 12.0, 13.0), 5, "timed_out")
    assert counted(recorder) | {"queue": 0} == {
        "queue": 0, "first_token": (1, 3.0), "per_output_token": (0, 0.0), "end_to_end": (0, 0.0)
    }  # fmt: skip
    recorder.finished(RequestTimes(10.0, 12.0, 13.0), 1, "stop")
    assert counted(recorder)["per_output_token"] == (0, 0.0)
    assert recorder.counters.finished == {"stop": 1, "length": 0, "cancelled": 1, "timed_out": 1, "error": 1}


def test_a_snapshot_is_plain_data_of_its_time():
    recorder = recorder_at(0.0)
    recorder.counters.lookup_tokens, recorder.counters.hit_tokens = 8, 6
    taken = snapshot(recorder, 1, 2, 1, Usage(1, 2, 3), {"full": Usage(4, 5, promised=2)}, 100, 200)
    values = taken.to_dict()
    recorder.counters.steps = 7
    recorder.finished(RequestTimes(0.0, 0.0, 0.0), 2, "stop")
    assert json.loads(json.dumps(values)) == values
    assert (values["steps"], values["finished"]["stop"], sum(values["histograms"]["queue"]["counts"])) == (0, 0, 0)
    assert (values["running"], values["waiting"], values["preempted"], values["hit_rate"]) == (1, 2, 1, 0.75)
    assert values["slots"] == {"used": 1, "free": 2, "cached": 3, "promised": 0}
    assert values["pages"] == {"full": {"used": 4, "free": 5, "cached": 0, "promised": 2}}
    assert (values["swap_used"], values["swap_max"]) == (100, 200)
    assert snapshot(recorder_at(0.0), 0, 0, 0, Usage(0, 1), {}).hit_rate == 0
