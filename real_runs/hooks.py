"""What runs inside the engine: a scheduler and a worker that report every block to one recorder.

Only the engine process imports this file (it imports vLLM). vLLM is not patched: both classes are engine arguments, and
methods of the model runner and of the drafter are wrapped on the instance. With VLLM_ENABLE_V1_MULTIPROCESSING=0 the
scheduler and the worker live in one process and share ``RECORDER``.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.core.sched.scheduler import Scheduler

from apexsim.embedding import project
from real_runs.parts import Block, Part
from real_runs.signals import Certainty, DraftLog, certainty

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
        embedding: Whether to record the embedding of each prompt that is prefilled alone.
        step: Number of the engine step now running; the same however often a recording was interrupted.
    """

    def __init__(self) -> None:
        self.depth: Depth | None = None
        self.active = False
        self.embedding = False
        self.step = 0
        self.parts: dict[str, Part] = {}
        self._chosen: dict[str, int] = {}  # depth of the next block of each running request
        self._drafted_s = 0.0  # seconds of the latest drafting, for the whole batch
        self._pending: dict[str, tuple[int, float]] = {}  # depth and draft seconds of the block now being verified
        self._rows: Certainty | None = None
        self._log = DraftLog()
        self._hidden: Any = None
        self._tokens = 0
        self._step: list[tuple[str, Block]] = []
        self._first: list[str] = []
        self._seconds = {"execute": 0.0, "sample": 0.0, "draft": 0.0}
        self._mixed = False

    def run_step(self, step: Callable[[], Any]) -> Any:
        """Runs one engine step and books its seconds: the whole step, less its timed phases, is overhead.

        A draft is made at the end of the step before the one that verifies it, so a block pays for the draft it submits,
        not for the one made after it.
        """
        self.step += 1
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
            if self.embedding and alone:
                self.parts[request].embedding = project(self._hidden)
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

    def executing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the runner's ``execute_model``."""
        timed = self.timed("execute", call)

        def wrapper(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self._tokens = scheduler_output.total_num_scheduled_tokens
            return timed(scheduler_output, *args, **kwargs)

        return wrapper

    def forward(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the runner's ``_model_forward``: keeps the mean of the target's last hidden states where it is wanted."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            if self.active and self.embedding:  # rows beyond the step's tokens are padding
                self._hidden = result[: self._tokens].float().mean(dim=0).tolist()
            return result

        return wrapper

    def sampling(self, runner: Any, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the runner's ``_sample``; in shadow mode it first reads how sure the target is of each row."""
        timed = self.timed("sample", call)

        def wrapper(logits: Any, *args: Any, **kwargs: Any) -> Any:
            if self.active and self.depth is None:
                self._rows = certainty(logits)
                self._log.compare(runner.input_batch.req_ids, self._rows.logp)
            return timed(logits, *args, **kwargs)

        return wrapper

    def draft_step(self, drafter: Any) -> None:
        """Wraps a neural drafter's greedy choice, to read in shadow mode how sure the drafter is of each token."""
        compute, choose = drafter.model.compute_logits, drafter._greedy_sample
        seen: list[Any] = []

        def compute_and_keep(*args: Any, **kwargs: Any) -> Any:
            seen[:] = [compute(*args, **kwargs)]
            return seen[0]

        def choose_and_read(*args: Any, **kwargs: Any) -> Any:
            tokens = choose(*args, **kwargs)
            if self.active and self.depth is None:
                mapping = getattr(drafter, "vocab_mapping", None)
                if mapping is not None:
                    self._log.to_target = mapping.draft_to_target_ids
                self._log.step(mapping.constrain_draft_logits(seen[0]) if mapping is not None else seen[0])
            return tokens

        drafter.model.compute_logits, drafter._greedy_sample = compute_and_keep, choose_and_read

    def drafting(self, runner: Any, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the runner's ``propose_draft_token_ids``.

        Here the outcome of the block is known and the next draft is not yet paid for: the place to choose depths. The
        drafter is asked for the largest of them, the scheduler then cuts each request's draft to its own.
        """
        timed = self.timed("draft", call)

        def wrapper(scheduler_output: Any, sampled: Any, *args: Any, **kwargs: Any) -> Any:
            batch = runner.input_batch
            if self.active and self.depth is not None:
                for row, internal in enumerate(batch.req_ids):
                    position = int(batch.num_tokens_no_spec[row]) - runner.requests[internal].num_prompt_tokens
                    if not isinstance(sampled, list):
                        # Neural drafters are asked before the step's tokens are booked; -1 marks rejected ones.
                        position += int((sampled[row] >= 0).sum())
                    self._chosen[internal] = self.depth(external(internal), position) if position > 0 else 0
                if runner.speculative_config.method != "suffix":  # vLLM's suffix drafter insists on its own depth
                    scheduler_output.num_spec_tokens_to_schedule = max(self._chosen[i] for i in batch.req_ids)
            self._log.begin()
            result = timed(scheduler_output, sampled, *args, **kwargs)
            self._log.end(batch.req_ids)
            self._drafted_s = self._seconds["draft"]
            return result

        return wrapper

    def cut(self, internal: str, position: int, draft: list[int]) -> list[int]:
        """The part of a draft that is submitted. Called after the block before it is booked."""
        if not self.active:
            return draft
        if self.depth is None:
            part = self.parts[external(internal)]
            part.drafts[position] = list(draft)
            for name, values in self._log.take(internal, draft).items():
                part.signals.setdefault(name, {})[position] = values
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
                # Greedy decoding: the chosen token is the most probable one.
                part.entropy.append(self._rows.entropy[row])
                part.probability.append(self._rows.top[row])
                part.gap.append(self._rows.gap[row])
                self._log.decided(internal, tokens[-1])
            return
        if not tokens or before == 0:
            self._mixed = True
            if tokens:
                self._first.append(part.request_id)
            return
        depth, draft_s = self._pending.get(internal, (0, 0.0))  # a plain engine has none
        context = request.num_prompt_tokens + before
        block = Block(
            before, depth, submitted, sampled - 1, len(tokens), draft_s, None, None, batch, context, self.step
        )
        self._step.append((part.request_id, block))

    def finish(self, internal: str) -> None:
        """Forgets the state of a request that ended."""
        self._chosen.pop(internal, None)
        self._pending.pop(internal, None)
        self._log.forget(internal)


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
    """vLLM's worker with methods of its model runner and drafter wrapped."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        drafter = getattr(self.model_runner, "drafter", None)
        if hasattr(drafter, "_greedy_sample"):
            RECORDER.draft_step(drafter)

    def init_device(self) -> None:
        super().init_device()
        runner = self.model_runner
        runner.execute_model = RECORDER.executing(runner.execute_model)
        runner._model_forward = RECORDER.forward(runner._model_forward)
        runner._sample = RECORDER.sampling(runner, runner._sample)
        runner.propose_draft_token_ids = RECORDER.drafting(runner, runner.propose_draft_token_ids)
