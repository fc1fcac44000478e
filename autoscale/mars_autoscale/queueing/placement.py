"""Chooses the replica for a request, by what replicas have cached and by their load.

Imports no Ray, torch or HTTP library.
"""

from collections import OrderedDict
from collections.abc import Collection, Hashable, Mapping, Sequence

from mars_autoscale.queueing.grants import reserve_of

_MAX_KEYS = 65_536
"""Number of pages remembered, about 15 MB; the least recently used are forgotten first."""
_MAX_SESSIONS = 16_384
"""Number of sessions remembered; the least recently used are forgotten first."""
TOKENS_PER_REQUEST = 512
"""Tokens of prompts yet to be computed that delay a new request as much as one more request in the
batch does."""


def load_of(num_requests: int, backlog_tokens: int) -> float:
    """Return a replica's load: its requests, and the backlog of its prompts as so many requests."""
    return num_requests + backlog_tokens / TOKENS_PER_REQUEST


def has_room(load: float, max_num_seqs: int) -> bool:
    """Return whether a replica's load, as by `load_of`, leaves room for a further request.

    Prompts yet to be computed count, since a request behind them would not begin soon, and may do
    so sooner elsewhere or in another order. A replica without requests always has room.
    """
    return load < max_num_seqs + reserve_of(max_num_seqs)


def slack_of(max_num_seqs: int) -> int:
    """Return the slack of a `Placement` on replicas that run so many requests at once.

    A few more requests in a batch cost little, and a cached prefix saves more than that.
    """
    return max(1, max_num_seqs // 4)


class PrefixMap:
    """Remembers which replicas received which beginnings of prompts."""

    def __init__(self, max_keys: int = _MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._holders = OrderedDict[Hashable, tuple[str, ...]]()  # least recently used first

    def __len__(self) -> int:
        return len(self._holders)

    def deepest(self, keys: Sequence[Hashable], among: Collection[str]) -> list[str]:
        """Return the replicas among some that hold the longest known beginning."""
        for key in reversed(keys):
            holders = [holder for holder in self._holders.get(key, ()) if holder in among]
            if holders:
                return holders
        return []

    def depths(self, keys: Sequence[Hashable], among: Collection[str]) -> dict[str, int]:
        """Return how many leading keys each replica among some holds, for those that hold any."""
        found = dict[str, int]()
        for depth in range(len(keys), 0, -1):
            for holder in self._holders.get(keys[depth - 1], ()):
                if holder in among:
                    found.setdefault(holder, depth)
        return found

    def record(self, keys: Sequence[Hashable], replica: str) -> None:
        """Remember a replica as a holder of a prompt's pages."""
        for key in reversed(keys):  # ends are then forgotten before beginnings
            holders = self._holders.pop(key, ())
            self._holders[key] = holders if replica in holders else (*holders, replica)
        while len(self._holders) > self._max_keys:
            self._holders.popitem(last=False)

    def retain(self, replicas: Collection[str]) -> None:
        """Forget all replicas except these."""
        for key, holders in list(self._holders.items()):
            left = tuple(holder for holder in holders if holder in replicas)
            if left:
                self._holders[key] = left
            else:
                del self._holders[key]


class Placement:
    """Chooses replicas that may have cached the prompt's beginning, unless they are busier.

    Only replicas that can take the request now are offered to it: one that has the prompt cached
    but no room is not waited for, since computing a prompt again takes less than a request's time.

    Bound: the chosen replica's load exceeds the least load by ``slack`` at most, or by the load
    that its cached part of the prompt would be. With loads of `load_of`, a prompt is placed behind
    at most (slack + requests of the least busy replica - requests of the chosen one) x
    ``TOKENS_PER_REQUEST`` more tokens of prompts than the least busy replica has left, or as many
    more as it need not compute; so a short prompt does not follow a long one where another replica
    has less to compute.
    """

    def __init__(
        self,
        slack: float,
        *,
        tokens_per_key: int = 0,
        max_keys: int = _MAX_KEYS,
        max_sessions: int = _MAX_SESSIONS,
    ) -> None:
        """Start without memory of any prompt.

        Sessions do not count for a replica whose load is more than ``slack`` above the least one,
        and prefixes only by the tokens that need not be computed again, ``tokens_per_key`` for each
        page. At most ``max_keys`` pages and ``max_sessions`` sessions are remembered.
        """
        self.slack = slack
        self._load_per_key = tokens_per_key / TOKENS_PER_REQUEST
        self.prefixes = PrefixMap(max_keys)
        self._max_sessions = max_sessions
        self._sessions = OrderedDict[str, str]()  # least recently used first
        self.known = frozenset[str]()

    def choose(
        self, keys: Sequence[Hashable], loads: Mapping[str, float], session: str | None = None
    ) -> str:
        """Return a replica for a prompt, and remember it for the prompt's pages and session.

        ``keys`` name beginnings of the prompt, one for each leading full page; ``loads`` is not
        empty; ``session`` is unique among all callers. The holders of the longest known beginning
        come first; the session's replica decides between them and stands in where no beginning is
        known.
        """
        most = min(loads.values()) + self.slack
        preferred = self.prefixes.deepest(keys, loads) or list(loads)
        chosen = min(preferred, key=loads.__getitem__)
        usual = self._sessions.get(session) if session is not None else None
        if usual in preferred and loads[usual] <= most:
            chosen = usual
        if loads[chosen] > most:
            held = self.prefixes.depths(keys, loads) if self._load_per_key else {}
            worth = {name: held.get(name, 0) * self._load_per_key for name in loads}
            chosen = min(loads, key=lambda name: loads[name] - worth[name])
        self.prefixes.record(keys, chosen)
        if session is not None:
            self._remember(session, chosen)
        return chosen

    def retain(self, replicas: Collection[str]) -> None:
        """Forget all replicas except these."""
        if self.known == (known := frozenset(replicas)):
            return
        self.known = known
        self.prefixes.retain(known)
        gone = [session for session, each in self._sessions.items() if each not in known]
        for session in gone:
            del self._sessions[session]

    def _remember(self, session: str, replica: str) -> None:
        self._sessions[session] = replica
        self._sessions.move_to_end(session)
        if len(self._sessions) > self._max_sessions:
            self._sessions.popitem(last=False)
