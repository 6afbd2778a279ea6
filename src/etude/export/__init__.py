"""Models for the time after training: plain weights, a folder for the Hub, torch.export and ONNX."""

from typing import TYPE_CHECKING

from etude.lazy import load_late

if TYPE_CHECKING:
    from etude.export.hub import save_hub
    from etude.export.program import save_onnx, save_program
    from etude.export.run import FORMATS, Exported, export_run
    from etude.export.weights import save_weights

__all__ = ["FORMATS", "Exported", "export_run", "save_hub", "save_onnx", "save_program", "save_weights"]

__getattr__ = load_late(__name__, __file__)
