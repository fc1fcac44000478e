"""The commands ``marsray bench decode``, ``load`` and ``compare``."""

import typer

from mars_platform.cli.main import show_help_without_command
from mars_platform.cli.options import AsJson, with_options
from mars_serve.bench.options import CompareOptions, DecodeOptions, LoadOptions
from mars_serve.cli.options import let_idle_threads_sleep

_FILE_WIDTH = 120  # columns of a table in a file or pipe
_LOAD_WIDTH = 160
_COMPARE_WIDTH = 190
_INTERRUPTED = 130  # the shell's status for SIGINT

bench = typer.Typer(rich_markup_mode=None)


@bench.callback(invoke_without_command=True)
def _bench(context: typer.Context) -> None:
    """Benchmark decoding, a server under load, or several servers."""
    show_help_without_command(context)


@bench.command()
@with_options
def decode(options: DecodeOptions, as_json: AsJson = False) -> None:
    """Compare the speed of decoders on the same prompts.

    The modes of the engine take turns. Outputs of generated prompts ignore end tokens, so that each
    has its drawn length. With --untrained, the number of tokens accepted per pass is drawn instead
    of decided by the model, so that step times can be measured without trained weights.
    """
    let_idle_threads_sleep()

    from rich.console import Console

    from mars_platform.cli.report import output_console
    from mars_serve.bench.decode.report import print_comparison
    from mars_serve.bench.decode.run import compare

    comparison = compare(options, Console(stderr=True))
    print_comparison(comparison, output_console(_FILE_WIDTH), as_json=as_json)


@bench.command()
@with_options
def load(options: LoadOptions) -> None:
    """Replay a request trace against a running server.

    Prints the latencies and rejections that clients saw. Each request is sent at its time in the
    trace, without waiting for others. A rejected or failed request misses the objective and has
    infinite latencies. Ctrl-C ends the test and reports the requests so far. Rows of --data with an
    "answer" are checked in the same way as by marsray eval.
    """
    from functools import partial

    from mars_platform.cli.progress import progress_display
    from mars_platform.cli.report import STANDARD_OUTPUT, output_console, write_json
    from mars_serve.bench.load.report import figures_json, print_load
    from mars_serve.bench.load.run import run_load

    with progress_display() as display:
        test = run_load(options, partial(display.update, "bench load"))
    if options.json_file != STANDARD_OUTPUT:
        print_load(test, output_console(_LOAD_WIDTH))
    if options.json_file is not None:
        write_json(options.json_file, figures_json(test))
    if test.replayed.was_interrupted:
        raise typer.Exit(_INTERRUPTED)


@bench.command()
@with_options
def compare(options: CompareOptions) -> None:
    """Compare the speed of this server and others on the same prompts.

    A round starts each server alone, on a free port, and measures it with each number of clients.
    """
    from functools import partial

    from mars_platform.cli.progress import progress_display
    from mars_platform.cli.report import STANDARD_OUTPUT, output_console, write_json, writing
    from mars_platform.cluster.processes import ended_by_sigterm
    from mars_serve.bench.compare.report import figures_json, markdown_of, print_servers
    from mars_serve.bench.compare.run import ServerComparison, compare_servers

    def write(comparison: ServerComparison) -> None:
        if options.out is not None:
            with writing(options.out):
                options.out.write_text(markdown_of(comparison), encoding="utf-8")
        if options.json_file not in (None, STANDARD_OUTPUT):
            write_json(options.json_file, figures_json(comparison))

    with ended_by_sigterm(), progress_display() as display:
        comparison = compare_servers(options, partial(display.update, "bench compare"), write)
    if options.json_file == STANDARD_OUTPUT:
        write_json(options.json_file, figures_json(comparison))
    else:
        print_servers(comparison, output_console(_COMPARE_WIDTH))
