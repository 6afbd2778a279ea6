"""Reading documents back from where they were found."""

import hashlib
import json
from pathlib import Path

import numpy as np

from etude.core.errors import DataError
from etude.corpus.worker.documents import json_text


class Texts:
    """Reads documents back from where they were found."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        plan = json.loads((self.folder / "plan.json").read_text(encoding="utf-8"))
        self.sources, self.options = plan["sources"], plan["options"]
        self.index = np.load(self.folder / "index.npy", mmap_mode="r")

    def read(self, start: int, stop: int) -> list[str]:
        """Return documents `start` to `stop` of the index in its order."""
        rows = np.array(self.index[start:stop])
        texts = [""] * len(rows)
        path, file = "", None
        try:
            for number in np.lexsort((rows["offset"], rows["source"])).tolist():  # as they lie on the disk
                _, _, raw, _, source, offset, size = rows[number].tolist()
                here, kind = (
                    self.sources[source] if source >= 0 else (str(self.folder / f"spool-{-1 - source}"), "text")
                )
                if here != path or file is None:
                    if file is not None:
                        file.close()
                    file, path = open(here, "rb"), here  # noqa: SIM115, PTH123 -- closed below
                file.seek(offset)
                content = file.read(size)
                if kind == "json":
                    content = json_text(path, offset, content, self.options["text_key"]).encode()
                if int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") != raw:
                    raise DataError(f"{path} changed while it was read; run the command again")
                texts[number] = content.decode()
        except FileNotFoundError:
            raise DataError(
                f"{path or here} was removed while the corpus was prepared; run the command again"
            ) from None
        finally:
            if file is not None:
                file.close()
        return texts
