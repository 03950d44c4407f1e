"""vLLM's loop with its real scheduler and no model: its steps while requests wait for other engines."""

import queue
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from kvpipe import _kvpipe
from kvpipe.control import ControlClient
from kvpipe.transfer_params import consume, produce
from kvpipe.vllm.handoff.idle_wait import IdleWait
from kvpipe.vllm.prompt_hash import prompt_hash
from tests.vllm.handoff.engine import SAMPLING, Engine, engine_config, new_id
from tests.vllm.handoff.test_scheduler import RANKS, prompt, until

pytestmark = pytest.mark.vllm


class Executor:
    """A worker that computes nothing, and reports the end of leases as the worker role does.

    Attributes:
        num_steps: Steps that it has got.
        loads: Requests whose load is under way, by handoff.
    """

    is_sleeping = False

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._leased: dict[bytes, str] = {}
        self._sampled: deque[ModelRunnerOutput] = deque()
        self.num_steps = 0
        self.loads: dict[bytes, str] = {}

    def execute_model(self, output: SchedulerOutput, *, non_block: bool) -> Future[ModelRunnerOutput | None]:
        """Ends a step at once, also if the engine waits for its end only later."""
        assert non_block
        self.num_steps += 1
        metadata: Any = output.kv_connector_metadata
        self._leased.update((lease.handoff, lease.request_id) for lease in metadata.leased)
        self.loads |= {load.handoff: load.request_id for load in metadata.loads}
        sent = {self._leased.pop(end.handoff) for end in metadata.ended if end.handoff in self._leased}
        received = {self.loads.pop(cancel.handoff) for cancel in metadata.cancels}
        result: Future[ModelRunnerOutput | None] = Future()
        ran = self._engine.run(output, finished_sending=sent or None, finished_recving=received or None)
        if output.num_scheduled_tokens:
            self._sampled.append(ran)
            result.set_result(None)
        else:
            result.set_result(ran)
        return result

    def sample_tokens(self, grammar: object, *, non_block: bool = False) -> Any:
        """The tokens of a step."""
        result: Future[ModelRunnerOutput] = Future()
        result.set_result(self._sampled.popleft())
        return result if non_block else result.result()


class Core(EngineCoreProc):
    """vLLM's engine without its sockets, processes and model."""

    def __init__(self, model: str, num_batches: int) -> None:
        # vLLM has made both by the time that it makes the scheduler.
        self.input_queue, self.output_queue = queue.Queue(), queue.Queue()
        self.engines_running, self.shutdown_state = False, EngineShutdownState.RUNNING
        arguments = {"async_scheduling": num_batches > 1}
        self.vllm_config = engine_config(model, arguments, lease_s=600, open_timeout_s=600)
        self.engine = Engine(self.vllm_config)
        self.scheduler = self.engine.scheduler
        self.model_executor: Any = Executor(self.engine)
        self.batch_queue_size = num_batches
        self.batch_queue = deque(maxlen=num_batches) if num_batches > 1 else None
        self.step_fn = self.step if num_batches == 1 else self.step_with_batch_queue
        self.async_scheduling = num_batches > 1
        self.is_mm_encoder_only = self.is_pooling_model = self.log_stats = False
        self.check_for_draft_tokens = self.publish_dp_lb_stats = self.enable_fault_tolerance = False
        self.process_input_queue_block = True
        self.aborts_queue, self._idle_state_callbacks = queue.Queue(), []
        self.has_coordinator, self._weight_version = False, ""
        # Of vLLM 0.30, and of 0.33.
        self.is_ec_consumer, self.reject_new_requests = True, False
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.run_busy_loop()
        except SystemExit:
            pass
        except BaseException as error:
            self.error = error
            raise

    @property
    def address(self) -> str:
        """The control port."""
        return self.engine.role.address

    @property
    def num_steps(self) -> int:
        """Steps that the workers have got."""
        assert self.error is None
        return self.model_executor.num_steps

    def receive(self, params: dict[str, Any] | None = None, length: int = 40, max_tokens: int = 1) -> Request:
        """Gets a request, as its input thread does."""
        request = self.engine.new_request(prompt(length), max_tokens, params=params)
        self.input_queue.put((EngineCoreRequestType.ADD, (request, 0)))
        return request

    def abort(self, request: Request) -> None:
        """Gets an abort, as its input thread does."""
        self.aborts_queue.put([request.request_id])
        self.input_queue.put((EngineCoreRequestType.ABORT, [request.request_id]))

    def reset(self) -> None:
        """Is told to withdraw its leases, as by `/reset_prefix_cache?reset_external=true`."""
        self.input_queue.put((EngineCoreRequestType.UTILITY, (0, 0, "reset_prefix_cache", (False, True))))

    def num_waiting(self) -> int:
        """Requests that cannot be scheduled yet, as its last output says to metrics."""
        stats = [it[1].scheduler_stats for it in list(self.output_queue.queue) if isinstance(it[1], EngineCoreOutputs)]
        return [it for it in stats if it is not None][-1].num_skipped_waiting_reqs

    def stands_by(self) -> bool:
        """True if it waits although it has requests."""
        assert self.error is None
        return bool(self.input_queue.not_empty._waiters) and bool(self.scheduler.requests)

    def close(self) -> None:
        """Ends it as a signal does. vLLM's loop does so only without leases."""
        self.reset()
        until(lambda: not any(request.is_finished() for request in list(self.scheduler.requests.values())))
        self.shutdown_state = EngineShutdownState.REQUESTED
        self.input_queue.put((EngineCoreRequestType.WAKEUP, None))
        self.thread.join(20)
        self.engine.close()


@pytest.fixture(params=[1, 2], ids=["synchronous", "asynchronous"])
def core(request: pytest.FixtureRequest, tiny_model: str) -> Iterator[Core]:
    """An engine that runs, with synchronous and with asynchronous scheduling."""
    core = Core(tiny_model, request.param)
    core.thread.start()
    yield core
    core.close()
    assert not core.thread.is_alive()
    assert core.error is None


@pytest.fixture
def client() -> ControlClient:
    """Asks control ports."""
    return ControlClient()


# Limit of steps for an event of the control plane or a request: independent of the engine's wait before it.
FEW_STEPS = 12


def leased(core: Core) -> tuple[Request, str]:
    """A finished request whose blocks are leased."""
    handoff = new_id()
    request = core.receive(produce(handoff))
    until(lambda: request.is_finished() and core.stands_by())
    return request, handoff


def test_an_engine_with_nothing_but_leases_makes_no_step_until_one_ends(core: Core, client: ControlClient) -> None:
    free = core.engine.num_free_blocks
    leases = [leased(core) for _ in range(3)]
    num_steps = core.num_steps
    for num_left, (_, handoff) in zip((2, 1, 0), leases, strict=True):
        assert client.release(core.address, handoff).wait(20)
        until(lambda: len(core.scheduler.requests) == num_left and (not num_left or core.stands_by()))  # noqa: B023
    assert core.num_steps - num_steps <= 3 * FEW_STEPS
    assert core.engine.num_free_blocks == free


class Waiting(NamedTuple):
    """A request that waits for a handoff of another engine."""

    request: Request
    handoff: bytes
    producer: _kvpipe.Control


@pytest.fixture
def waiting(core: Core) -> Iterator[Waiting]:
    """A request that waits for a handoff that its producer does not know."""
    producer = _kvpipe.Control("127.0.0.1:0", b"", open_timeout=600)
    handoff = new_id()
    request = core.receive(consume(handoff, producer.address or ""))
    until(core.stands_by)
    yield Waiting(request, bytes.fromhex(handoff), producer)
    producer.close()


def test_an_engine_whose_requests_wait_for_producers_makes_no_step_until_one_opens_a_handoff(
    core: Core, waiting: Waiting
) -> None:
    num_steps = core.num_steps
    request, handoff, producer = waiting
    producer.open(handoff, prompt_hash(request), request.num_prompt_tokens, RANKS)
    until(lambda: core.model_executor.loads)
    assert core.num_steps - num_steps <= FEW_STEPS
    # A load is reported by the workers, in a step.
    num_steps = core.num_steps
    until(lambda: core.num_steps > num_steps + FEW_STEPS)
    producer.finish(handoff, [7], "length", 0, SAMPLING.hash(request))
    core.abort(request)


def test_a_request_and_an_abort_end_the_wait_of_an_engine(core: Core, waiting: Waiting) -> None:
    _, handoff = leased(core)
    num_steps = core.num_steps
    new = core.receive()
    until(lambda: new.is_finished() and core.stands_by())
    core.abort(waiting.request)
    until(lambda: waiting.request.is_finished() and core.stands_by())
    assert core.num_steps - num_steps <= 2 * FEW_STEPS
    assert len(core.scheduler.requests) == 1, handoff


def test_leases_that_are_withdrawn_end_at_once(core: Core) -> None:
    lease, _ = leased(core)
    core.reset()
    until(lambda: lease.request_id not in core.scheduler.requests)


def test_metrics_have_the_requests_that_wait_before_the_engine_does(core: Core, waiting: Waiting) -> None:
    second = core.receive(consume(new_id(), waiting.producer.address or ""))
    until(lambda: second.request_id in core.scheduler.requests and core.stands_by())
    assert core.num_waiting() == 2
    core.abort(second)


class BesideAnother:
    """Stands for MultiConnector: another connector beside kvpipe's looks for one request's KV, without end.

    Attributes:
        length: Tokens of that request's prompt.
    """

    length = 77

    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Asks both."""
        if request.num_prompt_tokens == self.length:
            return None, False
        return self._own.get_num_new_matched_tokens(request, num_computed_tokens)


def lacking_blocks(core: Core) -> tuple[Request, list[Any]]:
    """A request that lacks blocks, and the blocks that it lacks."""
    pool = core.scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks())
    return core.receive(length=200), taken


def test_an_engine_whose_blocks_are_leased_makes_no_step_until_a_lease_ends(core: Core, client: ControlClient) -> None:
    _, handoff = leased(core)
    new, taken = lacking_blocks(core)
    until(lambda: new.request_id in core.scheduler.requests and core.stands_by())
    num_steps = core.num_steps
    core.scheduler.kv_cache_manager.block_pool.free_blocks(taken)
    assert client.release(core.address, handoff).wait(20)
    until(new.is_finished)
    assert core.num_steps - num_steps <= FEW_STEPS


def test_steps_go_on_where_an_engine_that_lacks_blocks_may_have_to_give_way(core: Core, waiting: Waiting) -> None:
    lease, _ = leased(core)
    new, taken = lacking_blocks(core)
    num_steps = core.num_steps
    until(lambda: core.num_steps > num_steps + FEW_STEPS)
    core.abort(new)
    until(lambda: new.is_finished() and core.stands_by())
    core.scheduler.kv_cache_manager.block_pool.free_blocks(taken)
    assert {lease.request_id, waiting.request.request_id} == core.scheduler.requests.keys()


def test_steps_go_on_while_a_request_waits_for_another_connector_of_the_engine(core: Core) -> None:
    leased(core)
    own, beside = core.scheduler.connector, BesideAnother(core.scheduler.connector)
    core.scheduler.connector = beside
    core.receive(length=beside.length)
    num_steps = core.num_steps
    until(lambda: core.num_steps > num_steps + FEW_STEPS)
    core.scheduler.connector = own
    until(lambda: len(core.scheduler.requests) == 1 and core.stands_by())


def test_no_wait_goes_on_when_the_control_plane_is_closed() -> None:
    core: Any = SimpleNamespace(input_queue=queue.Queue(), batch_queue=None)
    idle, control = IdleWait(core), _kvpipe.Control("127.0.0.1:0", b"")
    idle.watch(control)
    for _ in range(2):
        waiting = threading.Thread(target=idle.wait, daemon=True)
        waiting.start()
        control.close()
        waiting.join(20)
        assert not waiting.is_alive()
