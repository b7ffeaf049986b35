"""The program that test_register.py starts: 4 ranks of torch.distributed.

The ranks are forked after the imports, which take longer than the tests. Models that are
registered by UlyssesSPAttentionHF.register_with_transformers have the logits and the gradients of
one process in float64.
"""

import copy
import multiprocessing
import os
import socket
import sys

import torch
import torch.distributed as dist
import transformers
import ulysses
from families import build, loss_of, reference
from reference import TOLERANCE, error
from test_transformers import inputs

register = ulysses.UlyssesSPAttentionHF.register_with_transformers
TABLE = transformers.AttentionInterface._global_mapping


def step(model, state, call, labels):
    """Returns the logits of whole sequences, and the gradients of the mean loss by name."""
    ctx = state.context
    shards = {
        name: None if x is None else ulysses.local_tokens(x, context=ctx)
        for name, x in call.items()
    }
    model.zero_grad()
    logits = model(**shards).logits
    mine = ulysses.local_tokens(labels, context=ctx)
    mean = ulysses.reduce_sequence_parallel_loss(
        loss_of(logits, mine), (mine != -100).sum(), gradients="summed", context=ctx
    )
    mean.backward()
    grads = {}
    for name, p in model.named_parameters():
        grads[name] = p.grad.clone()
        dist.all_reduce(grads[name], group=state.get_sequence_parallel_group())
    return ulysses.gather_tokens(logits.detach(), context=ctx), grads


def on_one_rank(function):
    """Returns the result of function(), which only rank 0 calls."""
    found = [function() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]


def families(size, cases):
    """Compares models with windows, soft caps, sinks and shared key heads, packed and padded."""
    for family, core, kinds in cases:
        model = build(family, core)
        for kind in kinds:
            ids, positions, call, labels, documents = inputs(kind)
            state = register(model, core, size, ids.shape[0])
            want, _, gradients = on_one_rank(
                lambda: reference(family, ids, positions, labels, documents)  # noqa: B023
            )
            logits, grads = step(model, state, call, labels)
            real = ~want.isnan().any(-1)
            assert error(logits[real], want[real]) < TOLERANCE, (family, kind, size)
            for name, exact in gradients.items():
                assert error(grads[name], exact) < TOLERANCE, (family, kind, size, name)
        ulysses.UlyssesSPAttentionHF.unregister(core)


def groups(size):
    """The groups are consecutive ranks, and a second registration makes no others."""
    model, rank = build("llama", "sdpa"), dist.get_rank()
    state = register(model, "sdpa", size, 1)
    assert register(model, "sdpa", size, 1) is state
    assert state.get_sequence_parallel_world_size() == size
    assert state.get_sequence_parallel_rank() == rank % size
    ranks = dist.get_process_group_ranks(state.get_sequence_parallel_group())
    assert ranks == list(range(rank // size * size, rank // size * size + size)), ranks
    assert state.get_sequence_data_parallel_rank() == rank
    assert state.get_sequence_data_parallel_world_size() == dist.get_world_size()
    assert dist.get_world_size(state.get_sequence_data_parallel_group()) == dist.get_world_size()
    ulysses.UlyssesSPAttentionHF.unregister("sdpa")


def evaluation():
    """Training, evaluation without communication, and training again.

    Rank 0 alone evaluates whole sequences with a padding mask, so that a collective call would
    never return. 4 ranks share 2 key heads; the modules of the model stay as they were.
    """
    core = TABLE["sdpa"]
    model = build("mistral with a window", "sdpa")
    plain = copy.deepcopy(model).eval()
    ids, _, call, labels, _ = inputs("padded right")
    with torch.no_grad():
        want = plain(**call).logits
    kept = [m.__dict__.copy() for m in model.modules()]
    state = register(model, "sdpa", 4, 2, disable_in_eval=True)
    state = register(model, "sdpa", 4, 2, disable_in_eval=True)
    first = step(model, state, call, labels)
    if dist.get_rank() == 0:
        with torch.no_grad():
            assert torch.equal(model.eval()(**call).logits, want)
        model.train()
    dist.barrier()
    second = step(model, state, call, labels)
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])
    for m, before in zip(model.modules(), kept):
        now = {k: v for k, v in m.__dict__.items() if isinstance(v, (int, float, str))}
        assert now == {k: before[k] for k in now}, type(m)
    ulysses.UlyssesSPAttentionHF.unregister("sdpa")
    assert TABLE["sdpa"] is core
    with torch.no_grad():
        assert torch.equal(model.eval()(**call).logits, want)


def refusals():
    """What differs from the registration is refused on all ranks."""
    model = build("llama", "sdpa")
    state = register(model, "sdpa", 2, 1, 16, seq_length_is_variable=False)
    for words, rows, batch in (("micro_batch_size", 8, 2), ("seq_length_is_variable", 6, 1)):
        try:
            model(input_ids=torch.ones(batch, rows, dtype=torch.long))
            raise AssertionError(f"{words} was not refused")
        except ulysses.InvalidArgument as e:
            assert words in str(e), e
    assert model(input_ids=torch.ones(1, 8, dtype=torch.long)).logits.shape[1] == 8
    try:
        register(model, "sdpa", 2, 1 + state.context.rank)
        raise AssertionError("other arguments on another rank were not refused")
    except ulysses.InvalidArgument as e:
        assert "batch" in str(e), e
    ulysses.UlyssesSPAttentionHF.unregister("sdpa")
    try:
        register(model, "sdpa", 3, 1)
        raise AssertionError("3 of 4 ranks were not refused")
    except ValueError as e:
        assert "give a divisor of 4" in str(e), e


def main(rank, size, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    for sequence in (2, 4):
        groups(sequence)
    families(2, [("llama", "sdpa", ["packed"])])
    both = ["packed", "padded right"]
    windows = ("mistral with a window", "sdpa", both)
    families(4, [windows, ("gemma2", "flex_attention", both), ("gpt-oss", "flex_attention", both)])
    evaluation()
    refusals()
    dist.barrier()
    dist.destroy_process_group()
    print(f"rank {rank} ok", flush=True)


if __name__ == "__main__":
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    start = multiprocessing.get_context("fork").Process
    ranks = [start(target=main, args=(rank, 4, port)) for rank in range(4)]
    for p in ranks:
        p.start()
    for p in ranks:
        p.join(240)
    failed = [rank for rank, p in enumerate(ranks) if p.exitcode != 0]
    for p in ranks:
        p.kill()
    sys.exit(f"ranks {failed} failed" if failed else 0)
