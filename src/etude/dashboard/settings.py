"""What a person says about runs: tags, colours, what is archived, alert rules; kept in a file in the folder of runs."""

import json
import logging
import threading
from pathlib import Path
from typing import Any

from etude.core.files import write_text
from etude.monitor.reading import read_json

FILE = ".etude-dashboard.json"
MOST_TAGS, MOST_TAG_CHARS = 32, 64
logger = logging.getLogger("etude")


class Settings:
    """Reads and writes the file; if it cannot be written, settings last as long as the dashboard."""

    def __init__(self, root: Path) -> None:
        self._path = root / FILE
        self._lock = threading.Lock()
        self._is_written = True
        found = read_json(self._path) if self._path.is_file() and not self._path.is_symlink() else {}
        self._runs: dict[str, dict[str, Any]] = {
            key: one for key, one in _mapping(found.get("runs")).items() if isinstance(one, dict)
        }
        alerts = found.get("alerts")
        self.alerts: list[str] = [one for one in alerts if isinstance(one, str)] if isinstance(alerts, list) else []
        webhook = found.get("webhook")
        self.webhook: str | None = webhook if isinstance(webhook, str) else None

    def of(self, key: str) -> dict[str, Any]:
        """Return tags, archived and color of a run."""
        one = self._runs.get(key, {})
        tags = one.get("tags")
        return {
            "tags": [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else [],
            "archived": one.get("archived") is True,
            "color": one["color"] if isinstance(one.get("color"), int) else 0,
        }

    def give_colors(self, keys: list[str]) -> None:
        """Give every run that has none a color of its own, which it keeps."""
        with self._lock:
            new = [key for key in keys if not isinstance(self._runs.get(key, {}).get("color"), int)]
            if new:
                taken = [one["color"] for one in self._runs.values() if isinstance(one.get("color"), int)]
                for color, key in enumerate(new, start=max(taken, default=-1) + 1):
                    self._runs.setdefault(key, {})["color"] = color
                self._write()

    def tag(self, key: str, tags: list[str] | None, archived: bool | None) -> None:
        """Set tags and whether a run is archived; None changes nothing."""
        with self._lock:
            one = self._runs.setdefault(key, {})
            if tags is not None:
                one["tags"] = list(dict.fromkeys(tag.strip()[:MOST_TAG_CHARS] for tag in tags if tag.strip()))[
                    :MOST_TAGS
                ]
            if archived is not None:
                one["archived"] = archived
            self._write()

    def set_alerts(self, rules: list[str]) -> None:
        """Keep other alert rules."""
        with self._lock:
            self.alerts = rules
            self._write()

    def _write(self) -> None:
        content: dict[str, Any] = {"runs": self._runs, "alerts": self.alerts}
        if self.webhook is not None:
            content["webhook"] = self.webhook
        try:
            write_text(self._path, json.dumps(content, indent=1) + "\n")
        except OSError as error:
            if self._is_written:
                self._is_written = False
                logger.warning(
                    f"cannot write {self._path}: {error.strerror or error}; tags and alerts last until the end"
                )


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
