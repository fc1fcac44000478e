import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mars_platform.errors import UserError
from mars_train.data.token_store import (
    TokenStore,
    TokenStoreWriter,
    block_offsets,
    block_sizes,
    epoch_order,
    share,
    step_rows,
    temperatures,
)

# --- the store ------------------------------------------------------------------------------------

# (file, line) -> tokens and supervision
ROWS = {
    (0, 1): ([5, 6, 7], [False, True, True]),
    (0, 3): ([1, 2], [False, True]),
    (1, 2): ([2**31 - 1], [False]),
    (2, 1): ([9, 9, 9, 9], [True, True, False, True]),
}
FILES = ["index.npy", "store.json", "supervised.bin", "tokens.bin"]


def append(writer, rows):
    tokens, supervised = zip(*rows.values(), strict=True)
    writer.append(
        np.array(list(rows), np.int64),
        np.array([len(ids) for ids in tokens], np.int32),
        np.concatenate(tokens).astype(np.int32),
        np.concatenate(supervised),
    )


def write_store(path, *batches):
    with TokenStoreWriter(path) as writer:
        for rows in batches:
            append(writer, rows)
        return writer.finish()


def contents(store):
    return [(ids.tolist(), supervised.tolist()) for ids, supervised in store]


@pytest.fixture
def store(tmp_path):
    return write_store(tmp_path / "store", ROWS)


def test_rows_are_read_as_they_were_written(store):
    again = TokenStore(store.path)
    assert (len(again), again.num_tokens) == (4, 10)
    assert contents(again) == list(ROWS.values())
    ids, supervised = again[-1]
    assert (ids.dtype, supervised.dtype) == (np.int64, np.bool_)
    assert ids.tolist() == [9, 9, 9, 9]


@settings(max_examples=20)
@given(order=st.permutations(list(ROWS)), cut=st.integers(1, 3))
def test_order_of_arrival_does_not_matter(tmp_path_factory, order, cut):
    path = tmp_path_factory.mktemp("stores")
    canonical = write_store(path / "canonical", ROWS)
    batches = [{key: ROWS[key] for key in keys} for keys in (order[:cut], order[cut:])]
    arrived = write_store(path / "arrived", *batches)
    assert arrived.fingerprint == canonical.fingerprint
    assert contents(arrived) == list(ROWS.values())


@pytest.mark.parametrize(
    "change",
    [
        {(0, 1): ([5, 6, 8], [False, True, True])},
        {(0, 1): ([5, 6, 7], [True, True, True])},
        {(0, 1): ([5, 6], [False, True]), (0, 3): ([7, 1, 2], [True, False, True])},
        {(3, 1): ([5], [True])},
    ],
)
def test_different_contents_have_different_fingerprints(tmp_path, store, change):
    assert write_store(tmp_path / "other", ROWS | change).fingerprint != store.fingerprint


def test_the_fingerprint_does_not_change_between_versions(store):
    assert store.fingerprint == ("f1e4fa4642c413a6009282ec954468cb24e5123b16d2c0d374d977247b31c874")


def test_a_store_appears_only_when_it_is_complete(tmp_path):
    path = tmp_path / "store"
    with TokenStoreWriter(path) as writer:
        append(writer, ROWS)
        assert not path.exists()
    assert list(tmp_path.iterdir()) == []  # the writer was closed before it was finished
    write_store(path, ROWS)
    assert sorted(file.name for file in path.iterdir()) == FILES
    assert list(tmp_path.iterdir()) == [path]


def test_files_of_a_killed_writer_are_removed(tmp_path):
    (tmp_path / "store.partial").mkdir()
    (tmp_path / "store.partial" / "tokens.bin").write_bytes(b"rest")
    assert contents(write_store(tmp_path / "store", ROWS)) == list(ROWS.values())
    assert list(tmp_path.iterdir()) == [tmp_path / "store"]


def test_a_store_is_not_overwritten(store):
    with pytest.raises(UserError, match=r"store is there already; remove it"):
        TokenStoreWriter(store.path)
    assert contents(TokenStore(store.path)) == list(ROWS.values())


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(store, name):
    (store.path / name).unlink()
    with pytest.raises(UserError, match=rf"store/{name}: cannot be read \(.*No such file"):
        TokenStore(store.path)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("cut", [2, 8, None])
def test_a_truncated_file_is_named(store, name, cut):
    file = store.path / name
    content = file.read_bytes()
    file.write_bytes(content[: -cut if cut else 0])
    with pytest.raises(UserError, match=rf"^.*store/{name}: .*; prepare the data again$"):
        TokenStore(store.path)


def test_the_index_is_never_unpickled(store):
    np.save(store.path / "index.npy", np.array([{}] * 4, dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match=r"index\.npy: cannot be read"):
        TokenStore(store.path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"format_version": 2}, r"format_version: Input should be 1 \(got '2'\)"),
        ({"num_rows": -4}, "num_rows: "),
        ({"compression": "zstd"}, "compression: unknown key"),
    ],
)
def test_a_header_of_another_version_is_refused(store, change, problem):
    file = store.path / "store.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UserError, match=rf"store\.json: {problem}.*; prepare the data again"):
        TokenStore(store.path)


# --- order ----------------------------------------------------------------------------------------

SEEDS = st.integers(0, 2**64)
EPOCHS = st.integers(0, 1000)
SIZES = st.integers(1, 300)


def splitmix64(state):
    """Compute SplitMix64 with Python integers, after https://prng.di.unimi.it/splitmix64.c."""
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


@given(num_rows=SIZES, seed=st.integers(0, 2**64 - 1), epoch=EPOCHS, block_size=st.integers(1, 64))
def test_hash_is_splitmix64(num_rows, seed, epoch, block_size):
    assert splitmix64(0) == 0xE220A8397B1DCDAF  # published first output for the seed 0

    def hashed(purpose, row, epoch=epoch):
        state = 0
        for word in (purpose, seed, epoch, row):
            state = splitmix64((state + word) % 2**64)
        return state

    rows = np.arange(num_rows)
    expected = sorted(range(num_rows), key=lambda row: hashed(1, row))
    assert epoch_order(num_rows, seed, epoch).tolist() == expected
    offsets = block_offsets(rows, seed, epoch, block_size)
    assert offsets.tolist() == [hashed(2, row) % block_size for row in range(num_rows)]
    choices = [2, 3, block_size + 3]
    sizes = block_sizes(rows, seed, epoch, choices)
    assert sizes.tolist() == [choices[hashed(3, row) % 3] for row in range(num_rows)]
    drawn = temperatures(rows, seed, [0.0, 0.5, 1.0])
    assert drawn.tolist() == [hashed(4, row, epoch=0) % 3 / 2 for row in range(num_rows)]
    of_each = block_offsets(rows, seed, epoch, sizes)
    assert of_each.tolist() == [hashed(2, row) % int(sizes[row]) for row in range(num_rows)]


@given(num_rows=SIZES, batch_size=st.integers(1, 50), seed=SEEDS)
def test_each_row_occurs_once_per_epoch_without_the_incomplete_batch(num_rows, batch_size, seed):
    batch_size = min(batch_size, num_rows)
    steps_per_epoch = num_rows // batch_size
    for epoch in range(3):
        steps = range(epoch * steps_per_epoch, (epoch + 1) * steps_per_epoch)
        epochs, parts = zip(*(step_rows(num_rows, batch_size, seed, s) for s in steps), strict=True)
        assert set(epochs) == {epoch}
        rows = np.concatenate(parts)
        assert len(set(rows.tolist())) == len(rows) == steps_per_epoch * batch_size
        assert rows.tolist() == epoch_order(num_rows, seed, epoch)[: len(rows)].tolist()


@given(num_rows=st.integers(0, 100), num_workers=st.integers(1, 12))
def test_shares_of_workers_are_even_and_contiguous(num_rows, num_workers):
    rows = np.arange(num_rows) * 7
    shares = [share(rows, rank, num_workers) for rank in range(num_workers)]
    assert np.concatenate(shares).tolist() == rows.tolist()
    sizes = [len(part) for part in shares]
    assert max(sizes) - min(sizes) <= 1
