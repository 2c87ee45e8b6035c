"""Makes batches of a stream of documents, whose position a checkpoint keeps.

Reading is divided into lanes. A lane reads files of its own, or every k-th document of a file,
in an order that depends on the seed. Each row of the global batch belongs to one lane, and each
process reads the lanes of its rows. So a run continues with the same batches on any number of
processes, and its position is a few numbers for each lane.
"""

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Integer

from t5x_diffeq.cluster.processes import gather
from t5x_diffeq.data.batches import Rows, local_rows, prefetch, put_on_devices
from t5x_diffeq.data.encoding import Codes, TextEncoder
from t5x_diffeq.data.packing import Example, example_of, stack
from t5x_diffeq.data.rows import Skipped
from t5x_diffeq.data.stream_files import FileReader, OpenStream
from t5x_diffeq.data.tokenizer import Border
from t5x_diffeq.system.console import log
from t5x_diffeq.system.errors import InputError

BLOCK_DOCUMENTS = 1000  # documents that are shuffled together
_FRUITLESS_EPOCHS = 2  # a lane that finds no document in so many epochs gives up
_ENCODED_AT_ONCE = 64  # documents
_LANES = 4  # the number of lanes if there are as many files; each process has at least one
_PREFETCHED_BATCHES = 8


class LanePosition(NamedTuple):
    """Where a lane's next window begins."""

    place: int = 0  # the file's place in the endless sequence of all epochs' files
    row: int = 0  # the row of the file at which the block of documents begins
    library: dict | None = None  # the library's iterator at this row; None: the file's beginning
    document: int = 0  # the document in the shuffled block
    token: int = 0  # the token in the document
    rows: int = 0  # how many rows of its first epoch the lane had read when the block began
    # The counts and the faults of the rows that the lane had skipped by then (`rows.Skipped`).
    skipped: tuple[dict[str, int], dict[str, str]] = ({}, {})


class Lane:
    """The windows of one lane, from a position.

    The lane is number `number` of `lanes`; `seed` determines the order of files and documents.
    """

    def __init__(
        self,
        stream: OpenStream,
        encoder: TextEncoder,
        length: int,
        number: int,
        lanes: int,
        seed: int,
        position: LanePosition,
    ):
        self.stream, self.encoder, self.length, self.seed = stream, encoder, length, seed
        files = len(stream.train)
        self.sharers = -(-lanes // files)  # lanes that share a file; 1 if there are enough files
        self.group, self.share = divmod(number, self.sharers)
        self.groups = -(-lanes // self.sharers)
        # The last group may have fewer lanes.
        self.sharers = min(self.sharers, lanes - self.group * self.sharers)
        self.skipped, self.rows = Skipped(*position.skipped), position.rows
        self.logged = self.usable = 0
        self.documents: deque[tuple[LanePosition, Codes]] = deque()  # begun or to come
        self.start = position  # the position until there are documents
        # Where the next window begins in the first document, and how many codes follow from there.
        self.token, self.tokens = position.token, -position.token
        self.coming = self._documents(position)

    @property
    def position(self) -> LanePosition:
        """Where the next window begins."""
        at = self.documents[0][0] if self.documents else self.start
        return at._replace(token=self.token)

    def window(self) -> Integer[np.ndarray, " codes"]:
        """The next L + 1 codes; the last one is also the first of the next window."""
        while self.tokens < self.length + 1:
            self.documents.append(next(self.coming))
            self.tokens += len(self.documents[-1][1])
        parts, missing, start = [], self.length + 1, self.token
        for _, codes in self.documents:
            parts.append(codes[start : start + missing])
            missing, start = missing - len(parts[-1]), 0
            if not missing:
                break
        self.tokens -= self.length
        self.token += self.length
        while self.token >= len(self.documents[0][1]):
            self.token -= len(self.documents.popleft()[1])
        return np.concatenate(parts)

    def _documents(self, start: LanePosition) -> Iterator[tuple[LanePosition, Codes]]:
        """The codes of each document that can be trained on, with its position."""
        first = start.document
        for block, texts in self._blocks(start):
            documents = self._cut(texts)
            self.usable += len(documents)
            for at in range(first, len(documents), _ENCODED_AT_ONCE):
                some = documents[at : at + _ENCODED_AT_ONCE]
                encoded = iter(self.encoder.encode([piece for pieces in some for piece in pieces]))
                for number, pieces in enumerate(some, at):
                    codes = np.concatenate(
                        [*islice(encoded, len(pieces)), [self.encoder.end_of_text]]
                    )
                    yield block._replace(document=number), codes
            first = 0

    def _cut(self, texts: list[str]) -> list[list[Any]]:
        """The pieces of each document that can be trained on."""
        documents: list[list[Any]] = [[]]
        for piece, is_last in self.encoder.cut(texts, self.skipped):
            documents[-1].append(piece)
            if is_last:
                documents.append([])
        # Only when the number has doubled, so a long run prints few of these lines.
        if self.skipped.total() >= max(1, 2 * self.logged):
            self.logged = self.skipped.total()
            log(f"documents skipped so far: {self.skipped}")
        return documents[:-1]

    def _blocks(self, start: LanePosition) -> Iterator[tuple[LanePosition, list[str]]]:
        """Shuffled blocks of the lane's documents, each with the position of its beginning.

        Groups of lanes take turns with the files of all epochs, so that all files have been read
        before a file is read again.
        """
        files, fruitless = self.stream.train, 0
        place, row, library = max(start.place, self.group), start.row, start.library
        while fruitless <= _FRUITLESS_EPOCHS * len(files):
            usable = self.usable
            yield from self._blocks_of_file(place, row, library)
            if place < len(files) <= place + self.groups:  # the lane's first epoch has ended
                self.skipped.check(self.rows, self.stream.max_unreadable)
            fruitless = 0 if self.usable > usable else fruitless + 1
            place, row, library = place + self.groups, 0, None
        raise InputError(
            f"data.path={files.path}: a reader found no document to train on in "
            f"{_FRUITLESS_EPOCHS} passes; give more text or more files, fewer processes, or other "
            "text to validate on (data.validation_path)"
        )

    def _blocks_of_file(
        self, place: int, row: int, library: dict | None
    ) -> Iterator[tuple[LanePosition, list[str]]]:
        """The blocks of the file at a place, from a row of it where the library had this state."""
        reader = FileReader(self.stream.train, self._file_at(place), row, library)
        documents = iter(reader)
        while texts := list(islice(documents, BLOCK_DOCUMENTS)):
            skipped = dict(self.skipped), dict(self.skipped.faults)
            at = LanePosition(place, row, library, rows=self.rows, skipped=skipped)
            mine = (n for n in range(row, row + len(texts)) if n % self.sharers == self.share)
            ours = [texts[n - row] for n in mine if not self.stream.is_held_out(reader.number, n)]
            shuffle = np.random.default_rng([self.seed, place, row])
            yield at, [ours[n] for n in shuffle.permutation(len(ours))]
            row, library = row + len(texts), reader.state
            if place < len(self.stream.train):  # the first epoch, whose rows are counted
                self.rows += len(ours)
                self.skipped.check_endless(self.rows, self.stream.max_unreadable)

    def _file_at(self, place: int) -> int:
        """The number of a file: the files of each epoch are in an order of their own."""
        epoch, number = divmod(place, len(self.stream.train))
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.stream.train))
        return int(order[number])


class _LocalBatches(grain.IterDataset):
    """The `rows` of this process, of one global batch after the other.

    `lanes` has the lanes that these rows belong to, by number; `lane_of` has the number of the lane
    of every row of the global batch.
    """

    def __init__(
        self,
        lanes: dict[int, Lane],
        rows: Rows,
        lane_of: Integer[np.ndarray, " B"],
        border: Border,
        segments: bool,
    ):
        super().__init__()
        self.lanes, self.rows, self.lane_of = lanes, rows, lane_of
        self.border, self.segments = border, segments

    def __iter__(self) -> "_LocalIterator":
        return _LocalIterator(self)


class _LocalIterator(grain.DatasetIterator):
    def __init__(self, batches: _LocalBatches):
        super().__init__()
        self.batches = batches

    def __next__(self) -> Example:
        batches, wanted, examples = self.batches, set(self.batches.rows.tolist()), []
        for row, number in enumerate(batches.lane_of.tolist()):
            if number in batches.lanes:
                # Also for rows of other processes, so that all copies of a lane have one position.
                codes = batches.lanes[number].window()
                if row in wanted:
                    ends = batches.border, batches.segments
                    examples.append(example_of(codes[:-1], codes[1:], *ends))
        return stack(examples)

    def get_state(self) -> dict[str, list]:
        return {str(number): list(lane.position) for number, lane in self.batches.lanes.items()}

    def set_state(self, state: dict[str, list]) -> None:
        """Not needed: lanes are made at their positions."""
        raise NotImplementedError


@dataclass
class Stream:
    """Training data that is read, tokenised and shuffled while the model trains.

    `at` says, after the batches that were drawn: their number, the positions of this process's
    lanes, and the number of all lanes. It is None before `batches` is called.
    """

    stream: OpenStream
    encoder: TextEncoder
    length: int
    batch_size: int
    seed: int
    cross_documents: bool
    at: tuple[int, dict[str, list], int] | None = None

    def batches(
        self, sharding: NamedSharding, consumed: int, position: dict | None
    ) -> Iterator[dict[str, jax.Array]]:
        """The batches after the first `consumed`; earlier ones since `position` are dropped."""
        before, kept = (position["drawn"], position["lanes"]) if position else (0, [])
        lanes = len(kept) or self._number_of_lanes()
        lane_of = np.arange(self.batch_size) * lanes // self.batch_size
        rows = local_rows(sharding, self.batch_size)
        starts = [LanePosition(*each) for each in kept] or [LanePosition()] * lanes
        opened = {
            n: Lane(self.stream, self.encoder, self.length, n, lanes, self.seed, starts[n])
            for n in np.unique(lane_of[rows]).tolist()
        }
        border, segments = self.encoder.tokenizer.border, not self.cross_documents
        dataset = _LocalBatches(opened, rows, lane_of, border, segments)
        ahead = grain.experimental.ThreadPrefetchIterDataset(
            dataset, prefetch_buffer_size=_PREFETCHED_BATCHES
        )
        local = iter(ahead)
        self.at = before, local.get_state(), lanes
        local.start_prefetch()  # while the step compiles

        def read() -> Iterator[tuple[dict[str, jax.Array], dict[str, list], int]]:
            for number, batch in enumerate(local, before + 1):
                if number > consumed:
                    batch = put_on_devices(batch, rows, self.batch_size, sharding)
                    # The position goes with it, because `prefetch` is one batch ahead of training.
                    yield batch, local.get_state(), number

        def hand_out() -> Iterator[dict[str, jax.Array]]:
            try:
                for batch, state, number in prefetch(read()):
                    self.at = number, state, lanes
                    yield batch
            finally:  # closing waits for what is being read, perhaps for a silent server
                threading.Thread(target=local.close, daemon=True).start()

        return hand_out()

    def position(self) -> dict | None:
        """The position after the batches that were drawn, as JSON; all processes must call it."""
        if self.at is None:
            return None
        consumed, local, lanes = self.at
        positions = {
            number: position
            for by_lane in gather("positions in the stream", local)
            for number, position in by_lane.items()
        }
        return {"drawn": consumed, "lanes": [positions[str(number)] for number in range(lanes)]}

    def _number_of_lanes(self) -> int:
        """The number of lanes of a new run: equally many for each process, and at least one.

        There are no more than `_LANES`, files or rows of the batch, if that is possible.
        """
        processes = jax.process_count()
        per_process = max(1, min(_LANES, len(self.stream.train), self.batch_size) // processes)
        return min(self.batch_size, processes * per_process)

    def size(self) -> str:
        """`a stream of 12 files`: their number of tokens is unknown."""
        return f"a stream of {len(self.stream.train)} files"

    def epochs(self, count: int) -> str:
        """What happens at the end of the stream."""
        return "and the stream restarts when it ends"
