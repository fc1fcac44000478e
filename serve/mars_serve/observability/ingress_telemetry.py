"""Counts how the requests at an ingress ended, and how often they were moved.

Imports no Ray, torch or HTTP library.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from mars_autoscale.policy.reports import IngressReport
from mars_platform.tier import Tier
from mars_serve.observability.metric_families import MetricDefinition, Samples

_REQUESTS = MetricDefinition(
    "marsray_requests_total",
    "Requests to generate, by how they ended: stop, length, tool_calls, cancelled (the client "
    "left), error, or rejected with a status.",
)
_REJECTIONS = MetricDefinition(
    "marsray_rejections_total", "Requests to generate that were refused, by status and error code."
)
_ENDPOINTS = MetricDefinition(
    "marsray_endpoint_requests_total",
    "Requests to generate that have ended, by endpoint; those of batches among them.",
)
_BATCH_LINES = MetricDefinition(
    "marsray_batch_lines_total",
    "Lines of batches that were answered, by outcome: completed or failed (with an error).",
)
_MOVES = MetricDefinition(
    "marsray_moves_total",
    "Times that an output was sent to another replica, because one died or did not answer.",
)
_LORA_REQUESTS = MetricDefinition(
    "marsray_lora_requests_total", "Requests to generate with a LoRA adapter of a model."
)
_LORA_TOKENS = MetricDefinition(
    "marsray_lora_tokens_total", "Output tokens of requests with a LoRA adapter of a model."
)
_MOST_LORAS = 256
"""Most names of LoRA adapters that are counted apart; others count as \"\", since names may come
and go."""
_QUEUED = MetricDefinition(
    "marsray_num_requests_queued",
    "Requests at this ingress replica that no engine has begun, by tier.",
)


class IngressTelemetry(Collector):
    """Metrics of one ingress replica: how requests ended, and how often they were moved.

    Requests for models that ``models`` lacks count as model "". ``replica`` is a name that is
    unique among those that one server is scraped for.
    """

    def __init__(self, models: Collection[str], replica: str = "ingress") -> None:
        self.models = frozenset(models)
        self._replica = replica
        self._requests = Counter[tuple[str, ...]]()
        self._rejections = Counter[tuple[str, ...]]()
        self._endpoints = Counter[tuple[str, ...]]()
        self._batch_lines = Counter[tuple[str, ...]]()
        self._moves = Counter[tuple[str, ...]]()
        self._lora_requests = Counter[tuple[str, ...]]()
        self._lora_tokens = Counter[tuple[str, ...]]()
        self._queues: Mapping[str, Callable[[], Mapping[Tier, int]]] = {}

    def count(self, model: str | None, outcome: str, endpoint: str) -> None:
        """Count a request that has ended."""
        self._requests[self._known(model), outcome] += 1
        self._endpoints[self._known(model), endpoint] += 1

    def count_batch_line(self, model: str | None, *, is_right: bool) -> None:
        """Count a line of a batch that was answered, with an error unless it ``is_right``."""
        self._batch_lines[self._known(model), "completed" if is_right else "failed"] += 1

    def count_rejection(self, model: str | None, status: int, code: str | None) -> None:
        """Count a request that was refused with an HTTP status and one of the server's codes."""
        self._rejections[self._known(model), str(status), code or ""] += 1

    def count_moves(self, model: str | None, num: int) -> None:
        """Count how often the outputs of a request were sent to another replica."""
        self._moves[(self._known(model),)] += num

    def count_lora(self, model: str | None, lora: str, num_tokens: int) -> None:
        """Count a request with a LoRA adapter, and its output tokens."""
        label = self._known(model), lora
        if label not in self._lora_requests and len(self._lora_requests) >= _MOST_LORAS:
            label = self._known(model), ""
        self._lora_requests[label] += 1
        self._lora_tokens[label] += num_tokens

    def watch_queues(self, queues: Mapping[str, Callable[[], Mapping[Tier, int]]]) -> None:
        """Report what waits in some models' queues by tier, too; any thread may ask them."""
        self._queues = queues

    def report(self, model: str, arrived: int = 0, prompt_tokens: int = 0) -> IngressReport:
        """Return what is counted of one model, with what has arrived. Any thread may call this."""
        waiting = self._queues[model]() if model in self._queues else {}
        counted = self._requests, self._rejections, self._endpoints, self._batch_lines
        of_model = [
            {
                " ".join(labels).strip(): num
                for (name, *labels), num in counts.copy().items()
                if name == model
            }
            for counts in counted
        ]
        return IngressReport(self._replica, arrived, prompt_tokens, waiting, *of_model)

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families."""
        yield _REQUESTS.counter(self._samples(self._requests), "outcome")
        yield _REJECTIONS.counter(self._samples(self._rejections), "status", "code")
        yield _ENDPOINTS.counter(self._samples(self._endpoints), "endpoint")
        yield _BATCH_LINES.counter(self._samples(self._batch_lines), "outcome")
        yield _MOVES.counter(self._samples(self._moves))
        yield _LORA_REQUESTS.counter(self._samples(self._lora_requests), "lora")
        yield _LORA_TOKENS.counter(self._samples(self._lora_tokens), "lora")
        waiting: dict[tuple[str, ...], int] = {
            (model, tier.value): count
            for model, by_tier in self._queues.items()
            for tier, count in by_tier().items()
        }
        yield _QUEUED.gauge(self._samples(waiting), "tier")

    def _samples(self, counts: Mapping[tuple[str, ...], int]) -> Samples:
        return [
            ((model, self._replica, *labels), count)
            for (model, *labels), count in list(counts.items())
        ]

    def _known(self, model: str | None) -> str:
        return model if model in self.models else ""
