import gzip

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mars_autoscale.traces.files import TraceFormat, TraceRequest, read_trace
from mars_platform.errors import UserError
from mars_platform.tier import Tier
from trace_files import write_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
CSV = "arrival_s,prompt_tokens,output_tokens\n"


def arrivals(trace):
    return [request.arrival_s for request in trace]


@pytest.fixture
def file(tmp_path):
    def write(text, name="trace.csv"):
        path = tmp_path / name
        raw = text if isinstance(text, bytes) else text.encode()
        path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
        return path

    return write


CONTENT = {
    TraceFormat.AZURE: AZURE
    + "2023-11-16 18:17:04.0319699,3180,0\n2023-11-16 18:17:03.9799600,4808,10\n",
    TraceFormat.MOONCAKE: '{"timestamp": 27482, "input_length": 3180, "output_length": 0}\n\n'
    '{"timestamp": 27430, "input_length": 4808, "output_length": 10, "other": [1, 2]}\n',
    TraceFormat.CSV: CSV + "7.052009,3180,0\n7,4808,10\n",
}


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("guessed", [True, False])
@pytest.mark.parametrize("trace_format", list(TraceFormat))
def test_each_format_gives_the_same_sorted_trace(file, trace_format, guessed, ending):
    path = file(CONTENT[trace_format], f"trace{ending}")
    trace = read_trace(path, None if guessed else trace_format)
    later_s = 0.052 if trace_format is TraceFormat.MOONCAKE else 0.052009
    assert trace == [TraceRequest(0.0, 4808, 10), TraceRequest(later_s, 3180, 1)]


def test_the_blocks_of_mooncakes_prompts_are_kept(file):
    row = '{"timestamp": %d, "input_length": %d, "output_length": 1, "hash_ids": %s}\n'
    rows = [(0, 1025, [7, 8, 9]), (1000, 1024, [7, 8, 10, 11]), (2000, 3, [])]
    trace = read_trace(file("".join(row % each for each in rows)))
    assert [list(request.prefix) for request in trace] == [[7, 8, 9], [7, 8], []]
    with pytest.raises(UserError, match=r":1: hash_ids.1: .*'a'"):
        read_trace(file(row % (0, 1, '[1, "a"]')))


def test_azure_timestamps_may_have_an_offset_and_lack_a_fraction(file):
    rows = "2024-05-10 01:00:00.500000+01:00,1,2\n2024-05-10 00:00:00+00:00,3,4\n"
    rows += "2024-05-10 00:00:02,5,6\n"
    trace = read_trace(file(AZURE + rows))
    assert arrivals(trace) == [0.0, 0.5, 2.0]
    assert [request.prompt_tokens for request in trace] == [3, 1, 5]


def test_csv_may_have_tiers_other_columns_a_byte_order_mark_and_any_line_end(file):
    text = "\ufeffclass, arrival_s,note,prompt_tokens,output_tokens\r\nflex, 1,a,2,3\r\n\r\n"
    assert read_trace(file(text)) == [TraceRequest(0.0, 2, 3, Tier.FLEX)]


requests = st.builds(
    TraceRequest,
    st.floats(0, 1e6).map(lambda value: round(value, 6)),
    st.integers(0, 10**6),
    st.integers(1, 10**6),
    st.sampled_from(Tier),
)


@settings(derandomize=True)
@given(st.lists(requests, min_size=1, max_size=20), st.sampled_from(["t.csv", "t.csv.gz"]))
def test_a_written_trace_is_read_back(tmp_path_factory, trace, name):
    path = tmp_path_factory.mktemp("trace", numbered=True) / name
    begin_s = min(arrivals(trace))
    trace.sort(key=lambda request: request.arrival_s)
    write_trace(path, trace)
    read = read_trace(path)
    assert arrivals(read) == pytest.approx([s - begin_s for s in arrivals(trace)], abs=1e-6)
    for got, wrote in zip(read, trace, strict=True):
        assert (got.prompt_tokens, got.output_tokens) == (wrote.prompt_tokens, wrote.output_tokens)
        assert got.tier is wrote.tier


GOOD_AZURE = "2023-11-16 18:17:03.9799600,48,10\n"
GOOD_JSON = '{"timestamp": 0, "input_length": 1, "output_length": 1}\n'


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        (AZURE + GOOD_AZURE + "2023-11-16 18:17:03,-1,10\n", 3, "ContextTokens: .* 0 .*'-1'"),
        (AZURE + GOOD_AZURE + "2023-11-16 18:17:03,1,-1\n", 3, "GeneratedTokens: .*'-1'"),
        (AZURE + "yesterday,1,1\n", 2, "TIMESTAMP: .*'yesterday'"),
        (AZURE + "5,1,1\n", 2, "TIMESTAMP: .*'5'"),
        (AZURE + GOOD_AZURE + "\n2023-11-16 18:17:03,1\n", 4, "2 values, .* names 3"),
        (AZURE + "2023-11-16 18:17:03,1,1,1\n", 2, "4 values, .* names 3"),
        (CSV + "0,1,1\nnan,1,1\n", 3, "arrival_s: .*finite .*'nan'"),
        (CSV + "0,1.5,1\n", 2, "prompt_tokens: .*'1.5'"),
        (CSV + "0,1,\n", 2, "output_tokens: .*''"),
        (CSV.encode() + b"0,1,\xff\n", 2, "output_tokens: "),
        (CSV + f'0,1,"{"1" * 200_000}\n', 2, "field limit"),
        (CSV.strip() + ",class\n0,1,1,gold\n", 2, "class: .*'priority'.*'gold'"),
        (GOOD_JSON + '\n{"timestamp": 0\n', 3, "Invalid JSON"),
        (GOOD_JSON + "[0, 1, 1]\n", 2, "object"),
        (GOOD_JSON + '{"timestamp": 0, "input_length": 1}\n', 2, "output_length: required"),
        (GOOD_JSON.replace('length": 1', 'length": true'), 1, "input_length: .*'True'"),
        (GOOD_JSON.replace('length": 1', 'length": -1'), 1, "input_length: .*'-1'"),
        (GOOD_JSON.replace("0,", '"0",'), 1, "timestamp: .*'0'"),
    ],
)
def test_an_invalid_row_is_named_by_file_and_line(file, text, line, problem):
    path = file(text)
    with pytest.raises(UserError, match=f"^{path}:{line}: .*{problem}") as raised:
        read_trace(path)
    assert "correct or remove" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("text", ["", AZURE, CSV])
def test_an_empty_trace_is_refused(file, text):
    with pytest.raises(UserError, match="no request"):
        read_trace(file(text))


def test_a_format_that_cannot_be_guessed_is_refused(file):
    with pytest.raises(UserError, match=r"trace.csv:1: .*guessed.*mooncake.*azure.*arrival_s"):
        read_trace(file("time,tokens\n1,2\n"))


def test_a_header_of_another_format_is_refused(file):
    with pytest.raises(UserError, match=r":1: .*lacks ContextTokens; .*format"):
        read_trace(file("TIMESTAMP,GeneratedTokens\n"), TraceFormat.AZURE)


def test_files_that_cannot_be_read_are_user_errors(tmp_path):
    with pytest.raises(UserError, match=r"gone\.csv: cannot be read"):
        read_trace(tmp_path / "gone.csv")
    broken = tmp_path / "broken.csv.gz"
    broken.write_bytes(b"no gzip")
    with pytest.raises(UserError, match=r"broken\.csv\.gz: cannot be read"):
        read_trace(broken)
    rows = "".join(f"{i},{i * i},1\n" for i in range(5000))
    whole = gzip.compress((CSV + rows).encode())
    for damaged in (whole[:-2000], whole[:20] + b"\xff" * 99 + whole[119:]):
        broken.write_bytes(damaged)
        with pytest.raises(UserError, match=r"broken\.csv\.gz: cannot be read"):
            read_trace(broken)
