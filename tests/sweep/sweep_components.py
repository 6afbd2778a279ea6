"""A callback with which a run waits, or dies, in the middle."""

import os
import signal
import time
from pathlib import Path

from etude import Callback, register


@register("callback", "hold_or_die")
class HoldOrDie(Callback):
    """In the third epoch, dies once if there is a file `die`, fails if there is `fail`, waits while there is `hold`."""

    def on_epoch_begin(self, epoch):
        if epoch == 2 and Path("fail").exists():
            raise RuntimeError("shapes do not match")
        if epoch == 2 and Path("die").exists():
            Path("die").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        if epoch == 2 and Path("hold").exists():
            Path("reached").touch()
            while Path("hold").exists():
                time.sleep(0.01)
