"""Several processes of one evaluation: batches of requests shared between them, or one model split over them.

lm-eval's own way of sharing gives each process every n-th document. That moves requests into other batches, asks the
last request of a shorter share twice, needs a document for every process, and on CPUs it is not done at all: `HFLM`
then believes to be alone, and every process does all the work. Here every process goes through all requests, answers
whole batches of them, and gets the answers of the others, so that nothing but the time depends on the number of
processes.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from lm_eval.models.utils import Collator
from torch import distributed

T = TypeVar("T")

# Processes wait for each other once for each kind of request, and then as long as the slowest one takes. When one
# fails, its launcher ends the others.
_TIMEOUT = timedelta(weeks=52)


@dataclass(frozen=True)
class Ranks:
    """This process among those of the evaluation.

    Attributes:
        rank: Number of this process; 0 writes the results.
        size: Number of processes.
        split_model: Whether they hold one model together (tensor parallelism): each then answers everything.
        group: Group for Python objects, whatever backend the model's tensors use.
    """

    rank: int = 0
    size: int = 1
    split_model: bool = False
    group: Any = None

    @classmethod
    def current(cls, split_model: bool = False) -> "Ranks":
        """The processes of `torch.distributed`, where it runs; this one alone otherwise. All of them call this."""
        if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
            return cls()
        group = distributed.new_group(backend="gloo", timeout=_TIMEOUT)
        return cls(distributed.get_rank(), distributed.get_world_size(), split_model, group)

    @property
    def shares(self) -> bool:
        """Whether each process answers a part of the requests."""
        return self.size > 1 and not self.split_model

    @property
    def first(self) -> bool:
        """Whether this process reports for all."""
        return self.rank == 0

    def mine(self, batches: Sequence[T]) -> list[T]:
        """The batches that this process answers: every `size`-th one, so that long ones are spread evenly."""
        return list(batches[self.rank :: self.size] if self.shares else batches)

    def broadcast(self, value: T) -> T:
        """What the first process has as `value`."""
        if self.size == 1:
            return value
        box = [value]
        distributed.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """The `value` of every process, by rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, value, group=self.group)
        return found


def num_processes() -> int:
    """Processes that `torchrun` or `accelerate launch` started, 1 without them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def process_number() -> int:
    """Number of this process among them."""
    return int(os.environ.get("RANK", "0"))


def start_processes(device: str) -> None:
    """Connect the processes of a launcher, over gloo where they compute on CPUs; without a launcher do nothing.

    Done before lm-eval does so, which knows CPU processes only from an environment variable of accelerate.

    Args:
        device: Where the user wants to compute, `cpu` or an accelerator.
    """
    if num_processes() == 1 or distributed.is_initialized():
        return
    from accelerate import PartialState

    PartialState(cpu=device.startswith("cpu") or not torch.accelerator.is_available(), timeout=_TIMEOUT)


def stop_processes() -> None:
    """Close the connections; processes that wait for this one then fail instead of waiting on."""
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def generation_batches(
    requests: Sequence[tuple[str, dict[str, Any]]], batch_size: int, encode: Callable[[str], Sequence[int]]
) -> list[list[int]]:
    """Batches that `HFLM.generate_until` forms of requests, longest first.

    Of any of these batches it forms the same ones again: all are full but the last of each kind of settings.

    Args:
        requests: Prompts and their generation settings.
        batch_size: Requests of a batch.
        encode: The tokenizer.

    Returns:
        Places in `requests` by batch.
    """
    numbered = [(prompt, settings, i) for i, (prompt, settings) in enumerate(requests)]
    collator = Collator(
        numbered,
        sort_fn=lambda entry: (-len(encode(entry[0])), entry[0]),
        group_by="gen_kwargs",
        group_fn=lambda entry: entry[1],
    )
    return [[entry[2] for entry in batch] for batch in collator.get_batched(n=batch_size)]


def groups_of_context(contexts: Sequence[str]) -> list[list[int]]:
    """Places of equal texts, which lm-eval can answer at once, longest text first."""
    places: dict[str, list[int]] = defaultdict(list)
    for i, context in enumerate(contexts):
        places[context].append(i)
    return sorted(places.values(), key=lambda group: -len(contexts[group[0]]))
