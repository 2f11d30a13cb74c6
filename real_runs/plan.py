"""The plan of a recording: which engine processes run which passes over which requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from real_runs import drafters, models, prompts
from real_runs.options import DTYPE, CollectOptions
from real_runs.parts import Job, Run
from real_runs.prompts import Prompt

MAX_MODEL_LEN = 8192
TIMING_ROUNDS = 3
"""Speed drifted by a quarter within minutes here; engines are timed in turn, this often."""


@dataclass(frozen=True)
class Plan:
    """The jobs of a recording: a shadow job per method, timing jobs of the methods and the plain engine in turn, prefill."""

    shadow: dict[str, Job]
    timing: tuple[Job, ...]
    prefill: Job

    @property
    def jobs(self) -> tuple[Job, ...]:
        return (*self.shadow.values(), *self.timing, self.prefill)


def make_plan(options: CollectOptions, rows: Sequence[Prompt], model: str) -> Plan:
    """The jobs and runs of a recording.

    Args:
        options: What to record.
        rows: The prompts, tokenized.
        model: The resolved target.
    """
    everything = tuple(range(len(rows)))
    timed = prompts.stratified(rows, options.timing_requests)
    length = models.context_limit(model, MAX_MODEL_LEN)
    settings = {d.name: drafters.speculative(d, model, options.kmax) for d in options.drafters}

    def job(name: str, method: str, runs: list[Run], prefix_caching: bool = False) -> Job:
        engine_settings = (name, model, DTYPE, length, method, settings.get(method), options.seed, prefix_caching)
        return Job(*engine_settings, tuple(runs))

    def timing_job(number: int, method: str, rows_timed: tuple[int, ...]) -> Job:
        runs: list[Run] = []
        for batch in options.timing_batches:
            rest = (batch, options.timing_tokens or options.max_tokens, rows_timed)
            if method:
                fixed = [(k, f"{method}-k{k}-b{batch}", f"fixed:{method}:{k}") for k in options.timing_depths]
                runs += [Run(name, policy, "fixed", k, *rest) for k, name, policy in fixed]
                runs.append(Run(f"{method}-random-b{batch}", f"random:{method}", "random", options.kmax, *rest))
            else:
                runs.append(Run(f"ar-b{batch}", "ar", "fixed", 0, *rest))
        # Each prompt is decoded by many runs of an engine: its prefill, which is not what they time, is done once.
        return job(f"{method or 'plain'}-{number}", method, runs, prefix_caching=True)

    # Engines cannot take turns within a process, so they take turns in rounds, each over its share of the timed prompts.
    shares = [timed[r::TIMING_ROUNDS] for r in range(TIMING_ROUNDS)]
    timing = [
        timing_job(number, method, share)
        for number, share in enumerate(filter(None, shares), start=1)
        for method in (*options.methods, "")
    ]
    shadow = {}
    for method in options.methods:
        run = Run("shadow", "", "shadow", options.kmax, options.batch_size, options.max_tokens, everything)
        shadow[method] = job(f"shadow-{method}", method, [run])
    # Prefill is timed alone: in a shadow batch it shares its step with the decoding of others.
    prefill = job("prefill", "", [Run("prefill", "ar", "prefill", 0, 1, 1, everything)])
    return Plan(shadow, tuple(timing), prefill)
