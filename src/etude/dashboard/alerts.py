"""Alerts: rules in words, checked against every new record of a live run; to the page, and to a webhook."""

import json
import logging
import re
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from etude.core.errors import ConfigError
from etude.dashboard.catalogue import Run
from etude.dashboard.parsing import parse
from etude.dashboard.tail import Tail
from etude.monitor.live import ENDS
from etude.monitor.reading import METRICS, last_records

logger = logging.getLogger("etude")

FORMS = "`val_loss > 2 * best`, `loss > 10`, `loss is nan`, `no step for 10 min`, `state is failed`"
MOST_RULES, MOST_ALERTS = 100, 200
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?"
_COMPARES = re.compile(rf"(\S+?)\s*(<=|>=|<|>)\s*(?:({_NUMBER})\s*\*\s*(best)|(best)|({_NUMBER}))", re.IGNORECASE)
_IS_NAN = re.compile(r"(\S+)\s+is\s+(?:nan|inf|not\s+finite)", re.IGNORECASE)
_NO_STEP = re.compile(rf"no\s+step\s+for\s+({_NUMBER})\s*(s|sec|seconds|min|minutes|h|hours)", re.IGNORECASE)
_STATE = re.compile(r"state\s+is\s+(\w+)", re.IGNORECASE)
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_TIMEOUT_S = 10.0
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
}


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule; exactly one of `name`, `seconds` and `state` says what it is about."""

    text: str
    name: str = ""
    operator: str = ""
    """Empty: the value is not finite."""
    factor: float = 0.0
    of_best: bool = False
    """The limit is `factor` times the best value so far; for runs that are judged by this metric."""
    seconds: float = 0.0
    state: str = ""

    def holds_for(self, record: dict[str, Any], run: dict[str, Any]) -> bool | None:
        """Whether it holds for a record; None if the record says nothing about it."""
        value = record.get(self.name)
        is_bad = self.name in record and not (isinstance(value, (int, float)) and abs(value) != float("inf"))
        if not self.operator:
            return is_bad if self.name in record else None
        if is_bad or not isinstance(value, (int, float)):
            return None
        limit = self.factor
        if self.of_best:
            best = run.get("best")
            value_of_best = best.get("value") if isinstance(best, dict) else None
            if run.get("monitor") != self.name or not isinstance(value_of_best, (int, float)):
                return None
            limit *= value_of_best
        return _OPERATORS[self.operator](value, limit)

    def holds_now(self, run: dict[str, Any], now: float) -> bool | None:
        """Whether a rule about the state of a run holds; None if it is about records."""
        if self.state:
            return bool(run["state"] == self.state)
        if self.seconds:
            last = run.get("last_step_time")
            return run["state"] == "running" and isinstance(last, (int, float)) and now - last > self.seconds
        return None


def parse_rule(text: str) -> Rule:
    """Return the rule of a text; raises ConfigError.

    >>> parse_rule("val_loss > 2 * best").of_best, parse_rule("no step for 10 min").seconds
    (True, 600.0)
    """
    text = " ".join(text.split())
    if match := _NO_STEP.fullmatch(text):
        seconds = float(match[1]) * _SECONDS[match[2][0].lower()]
        if seconds > 0:
            return Rule(text, seconds=seconds)
    elif match := _STATE.fullmatch(text):
        if match[1].lower() in (*ENDS, "lost"):
            return Rule(text, state=match[1].lower())
    elif match := _IS_NAN.fullmatch(text):
        return Rule(text, name=match[1])
    elif match := _COMPARES.fullmatch(text):
        name, operator, factor, of_factor, of_best, limit = match.groups()
        return Rule(text, name, operator, float(factor or limit or 1.0), bool(of_factor or of_best))
    raise ConfigError(f"unknown alert rule {text[:200]!r}; rules are written like {FORMS}")


def checked_webhook(url: str) -> str:
    """Return the URL of a webhook; raises ConfigError unless it is one of http or https."""
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_good = False
    if not is_good:
        raise ConfigError(f"the webhook {url!r} is no URL of http or https")
    return url


class Webhook:
    """Sends alerts to a URL, each by a thread of its own; a failure is reported once."""

    def __init__(self, url: str, on_problem: Callable[[str], None] = logger.warning) -> None:
        self._url, self._on_problem = url, on_problem
        self._is_failing = False
        self._opener = urllib.request.build_opener(_NoRedirects)

    def send(self, alert: dict[str, Any]) -> None:
        """Send an alert soon."""
        threading.Thread(target=self._post, args=(alert,), name="etude-dashboard-webhook", daemon=True).start()

    def _post(self, alert: dict[str, Any]) -> None:
        body = json.dumps({"text": alert["message"], **alert}).encode()
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
        try:
            with self._opener.open(request, timeout=_TIMEOUT_S):
                self._is_failing = False
        except (OSError, ValueError) as error:
            was_failing, self._is_failing = self._is_failing, True
            if not was_failing:
                why = getattr(error, "reason", error)
                self._on_problem(f"the webhook failed: {why}; alerts are still shown in the page")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


class Alerts:
    """Checks the rules. A rule fires once for a run, and again only after it has not held meanwhile."""

    def __init__(self, rules: Iterable[str], on_alert: Callable[[dict[str, Any]], None]) -> None:
        self._on_alert = on_alert
        self.rules: dict[str, Rule] = {}
        self.fired: deque[dict[str, Any]] = deque(maxlen=MOST_ALERTS)
        self._holding: set[tuple[str, str]] = set()
        self._tails: dict[str, Tail] = {}
        self._seen: set[str] = set()
        """Runs that were live since the dashboard began; what ended before is no news."""
        self._lock = threading.Lock()
        for text in rules:
            try:
                self.add(text)
            except ConfigError as error:
                logger.warning(str(error))

    def add(self, text: str) -> str:
        """Add a rule and return it in its usual form; raises ConfigError."""
        rule = parse_rule(text)
        with self._lock:
            if len(self.rules) >= MOST_RULES and rule.text not in self.rules:
                raise ConfigError(f"there are {MOST_RULES} alert rules already; remove one first")
            self.rules[rule.text] = rule
            for key, tail in list(self._tails.items()):  # it may hold already
                if tail.is_live:
                    del self._tails[key]
        return rule.text

    def remove(self, text: str) -> bool:
        """Remove a rule; return whether there was one."""
        with self._lock:
            rule = self.rules.pop(" ".join(text.split()), None)
            self._holding = {one for one in self._holding if rule is None or one[0] != rule.text}
            return rule is not None

    def check(self, run: Run, state: dict[str, Any]) -> None:
        """Check the rules against the state and the new records of a run."""
        with self._lock:
            is_live = state["state"] == "running"
            if not is_live and run.key not in self._seen:
                return
            self._seen.add(run.key)
            records = self._new_records(run, is_live=is_live)
            for rule in self.rules.values():
                self._check(rule, run.key, state, records)

    def _check(self, rule: Rule, key: str, state: dict[str, Any], records: list[dict[str, Any]]) -> None:
        found = [(rule.holds_now(state, time.time()), {"step": state["step"]})]
        found += [(rule.holds_for(record, state), record) for record in records if rule.name]
        for holds, record in found:
            if holds and (rule.text, key) not in self._holding:
                self._holding.add((rule.text, key))
                self._fire(rule, key, state, record)
            elif holds is False:
                self._holding.discard((rule.text, key))

    def _fire(self, rule: Rule, key: str, state: dict[str, Any], record: dict[str, Any]) -> None:
        step, value = record.get("step"), record.get(rule.name)
        what = f": {rule.name} is {value if value is not None else 'not finite'}" if rule.name else ""
        alert = {
            "rule": rule.text,
            "run": key,
            "time": time.time(),
            "step": step,
            "value": value,
            "message": f"{state['name']} ({key}), step {step}: {rule.text}{what}",
        }
        self.fired.append(alert)
        self._on_alert(alert)

    def _new_records(self, run: Run, *, is_live: bool) -> list[dict[str, Any]]:
        tail = self._tails.get(run.key)
        if tail is None:
            tail = self._tails[run.key] = Tail(run.path / METRICS)
            tail.is_live = is_live
            latest: dict[str, Any] = {}
            for record in last_records(run.path / METRICS):
                latest |= record
            return [latest]
        tail.is_live = is_live
        lines = tail.new_lines()
        if tail.is_replaced:  # by a resume: these are records of before
            tail.to_end()
            return []
        return parse(lines)
