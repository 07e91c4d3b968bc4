"""Who failed and who only lost the one that did, by the end of what each printed. The texts are what torch really wrote."""

from __future__ import annotations

import signal

import pytest

from dtrain.node import wire
from dtrain.node.lastwords import LastWords, exceptions, is_whole, last_traceback, last_words
from dtrain.reasons import reason_of

GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/"
ADVICE = "This is typically caused by a remote worker crashing. Check the logs of the remote worker before reporting an error. GLHF! 🏖️"
LOST = f"RuntimeError: {GLOO}pair.cc:553] Connection closed by peer [127.0.0.1]:13727. {ADVICE}"


def raised(*messages: str, link: str = "During handling of the above exception, another exception occurred:") -> str:
    parts = [
        f'Traceback (most recent call last):\n  File "a.py", line {i}, in <module>\n    x()\n{text}' for i, text in enumerate(messages)
    ]
    return f"\n\n{link}\n\n".join(parts) + "\n"


def in_group(text: str) -> str:
    """As torch prints a traceback once there is a process group."""
    return "".join(f"[rank2]: {line}\n" if line else "\n" for line in text.splitlines())


def ended(output: str, exit_code: int = 1) -> LastWords:
    return last_words(output, exit_code, exit_code - 128 if exit_code > 128 else None)


@pytest.mark.parametrize(
    "message",
    [
        LOST,
        f"RuntimeError: {GLOO}pair.cc:537] Read error [127.0.0.1]:5537: Connection reset by peer. {ADVICE}",
        f"RuntimeError: {GLOO}unbound_buffer.cc:78] Timed out waiting 8000ms for recv operation to complete",
        "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown?",
        "torch.distributed.DistNetworkError: Broken pipe",
        "torch.distributed.DistNetworkError: The client socket has timed out after 8000ms while trying to connect to (127.0.0.1, 34150).",
        "torch.distributed.DistStoreError: Timed out after 9 seconds waiting for clients. 2/3 clients joined.",
        "torch.distributed.DistStoreError: wait timeout after 8000ms, keys: /default_pg/0//cpu//0/0",
        f"RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 5000 ms\n Original exception: \n{GLOO}pair.cc:537] Read error",
        "RuntimeError: Connection reset by peer",
        "torch.distributed.DistBackendError: NCCL error in: ../ProcessGroupNCCL.cpp:1970, remote process exited "
        "or there was a network error, NCCL version 2.27.5\nncclRemoteError: A call failed possibly due to a network error or "
        "a remote process exiting prematurely.\nLast error:\nsocketProgress: Connection closed by remote peer n1<50260>",
        "torch.distributed.DistBackendError: NCCL error in: ../ProcessGroupNCCL.cpp:1275, internal error, NCCL "
        "version 2.14.3\nncclInternalError: Internal check failed.\nLast error:\nNet : Connection closed by remote peer user<50260>",
        "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 2.",
        "torch.distributed.DistBackendError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value "
        "store by key '0', but store->get('0') got error: Connection reset by peer",
    ],
)  # fmt: skip
def test_an_exception_that_tells_of_a_lost_peer_is_no_cause(message: str) -> None:
    assert ended(raised(message)).is_peer_lost
    assert ended("epoch 1\n" + in_group(raised(message))).is_peer_lost


@pytest.mark.parametrize(
    "message",
    [
        "ValueError: bad batch",
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, "
        "useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
        "torch.distributed.DistBackendError: NCCL error in: ../NCCLUtils.hpp:1, unhandled cuda error\nncclUnhandledCudaError: "
        "Call to CUDA function failed.\nLast error:\nCuda failure 'out of memory'",
        "ConnectionResetError: [Errno 104] Connection reset by peer",  # the user's own socket
        "ValueError: cannot parse 'Connection closed by peer'",
    ],
)  # fmt: skip
def test_what_a_worker_raised_for_itself_is_a_cause(message: str) -> None:
    words = ended(f"[W1130 10:29:55.0 TCPStore.cpp:106] sendBytes failed on SocketImpl: Broken pipe\n{LOST}\n" + in_group(raised(message)))
    assert words.told.endswith(message) and not words.is_peer_lost


def test_the_abort_of_a_lost_peer_and_one_of_its_own() -> None:
    terminated = "terminate called after throwing an instance of "
    lost = f"{terminated}'gloo::IoException'\n  what():  {GLOO}pair.cc:572] Connection closed by peer [10.0.0.5]:53\n"
    words = ended("step 1\n" + lost + "Fatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n", 134)
    assert words == LastWords(lost.rstrip(), True)
    mismatch = (
        f"{terminated}'gloo::EnforceNotMet'\n  what():  [enforce fail at {GLOO[1:]}pair.cc:456] "
        "op.preamble.length <= op.nbytes. 699052 vs 4. Received data size doesn't match expected size.\n"
    )
    assert ended(mismatch, 134) == LastWords(mismatch.rstrip(), False)
    watchdog = (
        terminated
        + "'c10::DistBackendError'\n  what():  [PG ID 0 PG GUID 0(default_pg) Rank 3] Process group watchdog thread terminated with "
        "exception: {}\nException raised from checkTimeout at ../ProcessGroupNCCL.cpp:632 (most recent call first):\nframe #0: c10::Error\n"
    )
    assert ended(watchdog.format("[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4)"), 134).is_peer_lost
    remote = "NCCL error: remote process exited, NCCL version 2.20.5\nncclRemoteError: A call\nLast error:\nNET/IB : Got completion"
    assert ended(watchdog.format(remote), 134).told.endswith("Last error:\nNET/IB : Got completion")
    assert ended(watchdog.format(remote), 134).is_peer_lost
    assert not ended(watchdog.format("CUDA error: an illegal memory access was encountered"), 134).is_peer_lost
    assert ended(lost, 1) == LastWords("", False)  # it did not end that way


def test_in_a_chain_the_first_exception_decides() -> None:
    """A `finally` that waits for the others in vain, and a lost peer that was given another name."""
    assert not ended(raised("ValueError: bad batch", LOST)).is_peer_lost
    wrapped = raised(LOST, "TrainerError: step 3 failed", link="The above exception was the direct cause of the following exception:")
    assert ended(wrapped).is_peer_lost
    assert exceptions(wrapped.rstrip()) == [LOST, "TrainerError: step 3 failed"]


def test_a_traceback_counts_only_where_it_ended_the_worker() -> None:
    caught = raised("OSError: retrying")
    assert ended(caught + "step 1\n", 139).told == ""  # it went on, and then crashed
    assert ended(caught + "terminate called without an active exception\n", 134).told == caught.rstrip()  # it crashed while ending
    assert ended(caught + "step\n" * 50, 3).told == ""
    assert ended(caught + "wandb: 1 log\n" * 3, 3).told == caught.rstrip()
    assert ended(caught + "wandb: 1 log\n" * 50, 1).told == caught.rstrip()
    assert ended("nothing here\n", 1) == LastWords("", False)


def test_the_last_traceback_is_taken_whole_and_nothing_after_it() -> None:
    chained = raised("KeyError: 'x'", 'RuntimeError: Error(s) in loading state_dict for Net:\n\tMissing key(s): "a".')
    found = last_traceback(raised("OldError: no") + "line\n" + chained + "epoch 2\n")
    assert found == chained.rstrip()
    assert ended(in_group(chained)).told == found
    assert last_traceback("nothing here") == ""


def test_what_was_told_to_end_and_had_nothing_to_say() -> None:
    assert last_words("step 1\n", 128 + signal.SIGTERM, signal.SIGTERM) == LastWords("", False)


def test_a_script_that_python_cannot_read_is_an_exception() -> None:
    said = '  File "train.py", line 3\n    for in range(3):\n        ^^\nSyntaxError: invalid syntax\n'
    words = last_words(said, 1, None)
    assert words == LastWords(said.rstrip(), False)
    ended = wire.WorkerEnded(1.0, 0, 0, 1, None, words.told, symptom=False)
    assert reason_of(ended) == "exception"
    assert last_words(said, 3, None).told == ""


def test_what_a_full_disk_has_cut_off() -> None:
    """Python writes a traceback in pieces, of which a small one may find room where a larger one did not."""
    whole = ("ValueError: x", "KeyboardInterrupt", "torch.OutOfMemoryError: CUDA out of memory")
    assert [is_whole(last_traceback(raised("OSError: y", message))) for message in whole] == [True] * 3
    assert is_whole("terminate called after throwing an instance of 'c10::Error'\n  what():  no room")
    mark = "Traceback (most recent call last):"
    assert [is_whole(cut) for cut in ("", mark, f'{mark}\n  File "a.py", li', f"{mark}\nobject refcount : 2")] == [False] * 4
