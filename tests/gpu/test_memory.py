"""Tensors and blocks on a GPU, within a process and between two."""

import contextlib
import multiprocessing

import numpy as np
import pytest

from kvpipe import Agent, LookupBuffer, Pipe

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.gpu

TIMEOUT_S = 20


def on_gpu(values):
    return torch.as_tensor(values, device="cuda:0")


@pytest.mark.parametrize("size", [1, 3, 20_000, 5_000_001])
def test_tensors_go_between_gpu_and_host_in_every_pairing(size):
    with Pipe.listen() as receiver, Pipe.connect(receiver.address) as sender:
        values = torch.arange(size, dtype=torch.int32)
        for source in (values, values.cuda()):
            for out in (torch.zeros_like(values), torch.zeros_like(values).cuda()):
                sent = sender.isend_tensor(source)
                assert receiver.recv_tensor(out=out, timeout=TIMEOUT_S) is out
                sent.wait(TIMEOUT_S)
                assert torch.equal(out.cpu(), values)


def test_a_tensor_is_received_on_a_gpu_without_out():
    with Pipe.listen() as receiver, Pipe.connect(receiver.address) as sender:
        for values in (torch.arange(20_000), np.arange(20_000), None):
            sent = sender.isend_tensor(values)
            received = receiver.recv_tensor(device="cuda:0", timeout=TIMEOUT_S)
            sent.wait(TIMEOUT_S)
            if values is None:
                assert received is None
            else:
                assert received.is_cuda
                assert torch.equal(received.cpu(), torch.arange(20_000))


def test_a_send_sees_what_the_current_stream_was_given_before_it():
    with Pipe.listen() as receiver, Pipe.connect(receiver.address) as sender, torch.cuda.stream(torch.cuda.Stream()):
        tensor = torch.zeros(1 << 20, device="cuda:0")
        torch.cuda._sleep(1 << 30)
        tensor += 7
        sent = sender.isend_tensor(tensor)
        assert (receiver.recv_tensor(timeout=TIMEOUT_S) == 7).all()
        sent.wait(TIMEOUT_S)


def _send_on_gpu(address, size):
    with Pipe.connect(address) as sender:
        sender.send_tensor(torch.arange(size, device="cuda:0"))


@pytest.mark.parametrize("segments", ["False", "True"])
def test_a_tensor_goes_from_one_process_to_another_on_the_same_gpu_with_either_allocator(segments, monkeypatch):
    size = 16 << 20
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", f"expandable_segments:{segments}")
    with Pipe.listen() as receiver:
        process = multiprocessing.get_context("spawn").Process(target=_send_on_gpu, args=(receiver.address, size))
        process.start()
        out = torch.zeros(size, dtype=torch.int64, device="cuda:0")
        receiver.recv_tensor(out=out, timeout=60)
        assert torch.equal(out, torch.arange(size, device="cuda:0"))
        assert segments == "True" or receiver.transport == "cuda_ipc"
        process.join(60)
        assert process.exitcode == 0


def test_blocks_go_between_gpu_and_host_in_every_pairing():
    for source in (torch.arange(4096).to(torch.uint8).cuda(), torch.arange(4096, dtype=torch.uint8)):
        for target in (torch.zeros(4096, dtype=torch.uint8).cuda(), torch.zeros(4096, dtype=torch.uint8)):
            with Agent() as owner, Agent() as reader:
                owner.register(source, "kv", 1024)
                own = reader.register(target, "own", 1024, writable=True)
                assert own.device == str(target.device)
                peer = reader.connect(owner.address)
                assert peer.regions["kv"].device == str(source.device)
                peer.read_blocks(own, [0, 2], "kv", [2, 0]).wait(TIMEOUT_S)
                assert torch.equal(target[:1024].cpu(), source[2048:3072].cpu())


def numbers(count):
    """Bytes on the GPU that differ between positions."""
    return (torch.arange(count, dtype=torch.int64) * 2654435761 % 251).to(torch.uint8).cuda()


def _own_blocks_on_gpu(to_reader, from_reader, sizes, num_bytes, skipped):
    with Agent() as owner:
        # Not at the beginning of an allocation.
        blocks = numbers(num_bytes + skipped)[skipped:]
        for size in sizes:
            owner.register(blocks, f"kv-{size}", size)
        to_reader.send(owner.address)
        from_reader.recv()


@contextlib.contextmanager
def owner_of_blocks(sizes, num_bytes, skipped=0):
    """Another process with blocks of these sizes on the GPU: the address of its agent."""
    context = multiprocessing.get_context("spawn")
    (address, to_reader), (from_reader, end) = context.Pipe(duplex=False), context.Pipe(duplex=False)
    arguments = (to_reader, from_reader, sizes, num_bytes, skipped)
    process = context.Process(target=_own_blocks_on_gpu, args=arguments)
    process.start()
    try:
        assert address.poll(60)
        yield address.recv()
    finally:
        end.send("end")
        process.join(60)
    assert process.exitcode == 0


@pytest.mark.parametrize("skipped", [0, 3])
def test_scattered_blocks_of_another_process_are_exact_whatever_their_size_and_alignment(skipped):
    sizes, num_bytes = [24, 1000, 4096, 65_536, 2_000_000], 40_000_000
    expected = numbers(num_bytes + skipped)[skipped:]
    torch.cuda.synchronize()
    with owner_of_blocks(sizes, num_bytes, skipped) as address, Agent() as reader:
        own = {}
        for size in sizes:
            target = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda:0")
            own[size] = target, reader.register(target, f"own-{size}", size, writable=True)
        peer = reader.connect(address)
        for size, (target, region) in own.items():
            places = num_bytes // size
            chosen = min(places, 10_000)
            to, source = torch.randperm(places)[:chosen], torch.randperm(places)[:chosen]
            peer.read_blocks(region, to.tolist(), f"kv-{size}", source.tolist()).wait(TIMEOUT_S)
            rows, wanted = (one[: places * size].view(places, size) for one in (target, expected))
            assert torch.equal(rows[to.cuda()], wanted[source.cuda()])
            rows[to.cuda()] = 0
            assert not target.any(), "nothing but the blocks was written"


def test_many_reads_of_another_process_at_once_are_exact():
    size, places = 4096, 8192
    expected = numbers(size * places).view(places, size)
    target = torch.zeros_like(expected)
    torch.cuda.synchronize()
    with owner_of_blocks([size], size * places) as address, Agent() as reader:
        region = reader.register(target.view(-1), "own", size, writable=True)
        peer = reader.connect(address)
        order = torch.randperm(places).tolist()
        parts = [order[first : first + 32] for first in range(0, places, 32)]
        for work in [peer.read_blocks(region, part, f"kv-{size}", part) for part in parts]:
            work.wait(TIMEOUT_S)
        assert torch.equal(target, expected)


def test_a_reader_that_closes_while_it_reads_leaves_the_gpu_usable():
    size, places = 1 << 20, 256
    target = torch.zeros(size * places, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    with owner_of_blocks([size], size * places) as address:
        for _ in range(5):
            with Agent() as reader:
                region = reader.register(target, "own", size, writable=True)
                peer = reader.connect(address)
                works = [peer.read_blocks(region, [at], f"kv-{size}", [at]) for at in range(places)]
                works[0].wait(TIMEOUT_S)
        torch.cuda.synchronize()
        with Agent() as reader:
            region = reader.register(target, "own", size, writable=True)
            everything = list(range(places))
            reader.connect(address).read_blocks(region, everything, f"kv-{size}", everything).wait(TIMEOUT_S)
    assert torch.equal(target, numbers(size * places))


def test_a_cuda_tensor_is_inserted_into_a_lookup_buffer_as_a_copy_on_the_host():
    buffer, tokens = LookupBuffer(), torch.arange(8)
    buffer.insert(tokens.cuda(), None, on_gpu([1.0]), None, None)
    entry = buffer.drop_select(tokens, None, timeout=TIMEOUT_S)
    assert entry[2].tolist() == [1.0]
    assert not entry[2].is_cuda
