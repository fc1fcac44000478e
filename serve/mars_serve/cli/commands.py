"""The commands ``marsray generate``, ``marsray eval`` and ``marsray serve``."""

from mars_platform.cli.options import AsJson, with_options
from mars_serve.cli.options import GenerateOptions, ServeOptions, let_idle_threads_sleep
from mars_serve.measure.options import EvalOptions

_FILE_WIDTH = 128  # columns of a table in a file or pipe


@with_options
def generate(options: GenerateOptions, as_json: AsJson = False) -> None:
    """Complete one prompt, with tokens shaded by forward pass."""
    let_idle_threads_sleep()

    from rich.console import Console

    from mars_platform.cli.progress import working
    from mars_serve.cli.completion import generate_once, print_completion

    with working(f"loading {options.model} and completing the prompt"):
        result = generate_once(options)
    print_completion(result, Console(), as_json=as_json)


@with_options
def eval_(options: EvalOptions, as_json: AsJson = False) -> None:
    """Score a checkpoint on held-out conversations.

    Reports quality and tokens per forward pass for each mode and threshold. A row with an "answer"
    is checked: the output is correct if it ends with "Answer:" or "####" and that answer. Numbers
    are compared by value (1,234 equals 1234, 72.0 equals 72), all else exactly. Rows without an
    answer count towards tokens per forward pass and the share of outputs equal to those of mode ar.
    """
    let_idle_threads_sleep()

    from rich.console import Console

    from mars_platform.cli.report import output_console
    from mars_serve.measure.evaluation.evaluate import evaluate
    from mars_serve.measure.evaluation.report import print_evaluation

    evaluation = evaluate(options, Console(stderr=True))
    print_evaluation(evaluation, output_console(_FILE_WIDTH), as_json=as_json)


@with_options
def serve(options: ServeOptions) -> None:
    """Serve models behind OpenAI-compatible REST endpoints."""
    from rich.console import Console

    from mars_serve.cli.serve_settings import serve_settings
    from mars_serve.deploy.run import run_server

    run_server(serve_settings(options), Console())
