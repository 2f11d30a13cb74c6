"""What runs inside the engine: a scheduler and a worker that report every block to one recorder.

Only the engine process imports this file (it imports vLLM). vLLM is not patched: both classes are engine arguments, and
three methods of the model runner are wrapped on the instance. With VLLM_ENABLE_V1_MULTIPROCESSING=0 the scheduler and
the worker live in one process and share ``RECORDER``.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.core.sched.scheduler import Scheduler

from real_runs.parts import Block, Part

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as BaseWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as BaseWorker

Depth = Callable[[str, int], int]
"""(request id, position) -> depth k of the block that starts there."""


class Recorder:
    """Collects what the hooks see and holds the one decision they act on.

    Attributes:
        depth: The rule for the depth of each block; None means shadow drafting: record K_max draft tokens at every
            position and submit none of them.
        active: False while warming up; nothing is recorded then.
    """

    def __init__(self) -> None:
        self.depth: Depth | None = None
        self.active = False
        self.parts: dict[str, Part] = {}
        self._chosen: dict[str, int] = {}  # depth of the next block of each running request
        self._drafted_s = 0.0  # seconds of the latest drafting, for the whole batch
        self._pending: dict[str, tuple[int, float]] = {}  # depth and draft seconds of the block now being verified
        self._rows: tuple[list[float], list[float]] | None = None
        self._step: list[tuple[str, Block]] = []
        self._first: list[str] = []
        self._seconds = {"execute": 0.0, "sample": 0.0, "draft": 0.0}
        self._mixed = False

    def run_step(self, step: Callable[[], Any]) -> Any:
        """Runs one engine step and books its seconds: the whole step, less its timed phases, is overhead.

        A draft is made at the end of the step before the one that verifies it, so a block pays for the draft it submits,
        not for the one made after it.
        """
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        self._step, self._first, self._mixed = [], [], False
        start = perf_counter()
        result = step()
        total = perf_counter() - start
        verify = self._seconds["execute"] + self._seconds["sample"]
        overhead = max(0.0, total - verify - self._seconds["draft"])
        for request, block in self._step:
            # A step that also ran somebody's prefill says nothing about the time of a decode block.
            if self._mixed:
                block.draft_s = block.verify_s = block.overhead_s = None
            else:
                block.verify_s, block.overhead_s = verify, overhead
            self.parts[request].blocks.append(block)
        for request in self._first:
            alone = not self._step and len(self._first) == 1
            self.parts[request].prefill_s = total - self._seconds["draft"] if alone else None
        return result

    def timed(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, with its seconds added to a phase of the step."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            _synchronize()
            start = perf_counter()
            result = call(*args, **kwargs)
            _synchronize()
            self._seconds[phase] += perf_counter() - start
            return result

        return wrapper

    def sampling(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the runner's ``_sample``; in shadow mode it first reads entropy and top probability of each row."""
        timed = self.timed("sample", call)

        def wrapper(logits: Any, *args: Any, **kwargs: Any) -> Any:
            if self.active and self.depth is None:
                logp = logits.float().log_softmax(dim=-1)
                entropy = -(logp.exp() * logp).nan_to_num(0.0).sum(dim=-1)
                # Greedy decoding: the chosen token is the most probable one.
                self._rows = entropy.tolist(), logp.amax(dim=-1).exp().tolist()
            return timed(logits, *args, **kwargs)

        return wrapper

    def drafting(self, runner: Any, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the runner's ``propose_draft_token_ids``.

        Here the outcome of the block is known and the next draft is not yet paid for: the place to choose depths. The
        drafter is asked for the largest of them, the scheduler then cuts each request's draft to its own.
        """
        timed = self.timed("draft", call)

        def wrapper(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            batch = runner.input_batch
            if self.active and self.depth is not None:
                for row, internal in enumerate(batch.req_ids):
                    position = int(batch.num_tokens_no_spec[row]) - runner.requests[internal].num_prompt_tokens
                    self._chosen[internal] = self.depth(external(internal), position) if position > 0 else 0
                scheduler_output.num_spec_tokens_to_schedule = max(self._chosen[i] for i in batch.req_ids)
            result = timed(scheduler_output, *args, **kwargs)
            self._drafted_s = self._seconds["draft"]
            return result

        return wrapper

    def cut(self, internal: str, position: int, draft: list[int]) -> list[int]:
        """The part of a draft that is submitted. Called after the block before it is booked."""
        if not self.active:
            return draft
        if self.depth is None:
            self.parts[external(internal)].drafts[position] = list(draft)
            return []
        self._pending[internal] = self._chosen[internal], self._drafted_s
        return draft[: self._chosen[internal]]

    def emitted(
        self, internal: str, request: Any, before: int, submitted: int, sampled: int, batch: int, row: int
    ) -> None:
        """Books the tokens one request got from the step; a step that only prefilled a part of the prompt gave none."""
        if not self.active:
            return
        part = self.parts[external(internal)]
        tokens = list(request.output_token_ids[before:])
        part.token_ids.extend(tokens)
        if self.depth is None:
            if tokens and self._rows is not None:
                part.entropy.append(self._rows[0][row])
                part.probability.append(self._rows[1][row])
            return
        if not tokens or before == 0:
            self._mixed = True
            if tokens:
                self._first.append(part.request_id)
            return
        depth, draft_s = self._pending.get(internal, (0, 0.0))  # a plain engine has none
        context = request.num_prompt_tokens + before
        block = Block(before, depth, submitted, sampled - 1, len(tokens), draft_s, None, None, batch, context)
        self._step.append((part.request_id, block))

    def finish(self, internal: str) -> None:
        """Forgets the state of a request that ended."""
        self._chosen.pop(internal, None)
        self._pending.pop(internal, None)


RECORDER = Recorder()


def external(internal: str) -> str:
    """The request id as given to the engine, which appends ``-<suffix>``."""
    return internal.rsplit("-", 1)[0]


def _synchronize() -> None:
    # On a GPU the calls return before the work is done; on the CPU there is nothing to wait for.
    if current_platform.is_cuda_alike():
        import torch

        torch.cuda.synchronize()


class RecordingScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's scheduler; submits of each draft what the recorder says, and reports what each step emitted."""

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        for row, internal in enumerate(draft_token_ids.req_ids):
            request = self.requests.get(internal)
            if request is not None and not request.is_finished() and not request.is_prefill_chunk:
                draft = draft_token_ids.draft_token_ids[row]
                draft_token_ids.draft_token_ids[row] = RECORDER.cut(internal, request.num_output_tokens, draft)
        super().update_draft_token_ids(draft_token_ids)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        step = []
        for internal in scheduler_output.num_scheduled_tokens:
            row = model_runner_output.req_id_to_index[internal]
            # Counted before the scheduler sees them: it cuts the list in place where the output ends.
            sampled = len(model_runner_output.sampled_token_ids[row])
            request = self.requests[internal]
            step.append((internal, request, request.num_output_tokens, sampled, row))
        result = super().update_from_output(scheduler_output, model_runner_output)
        for internal, request, before, sampled, row in step:
            submitted = len(scheduler_output.scheduled_spec_decode_tokens.get(internal, ()))
            RECORDER.emitted(internal, request, before, submitted, sampled, len(step), row)
            if request.is_finished():
                RECORDER.finish(internal)
        return result


class RecordingWorker(BaseWorker):  # type: ignore[misc]
    """vLLM's worker with three methods of its model runner wrapped."""

    def init_device(self) -> None:
        super().init_device()
        runner = self.model_runner
        runner.execute_model = RECORDER.timed("execute", runner.execute_model)
        runner._sample = RECORDER.sampling(runner._sample)
        runner.propose_draft_token_ids = RECORDER.drafting(runner, runner.propose_draft_token_ids)
