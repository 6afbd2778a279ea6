"""Models for the time after training: plain weights, a folder for the Hub, torch.export and ONNX."""

from typing import TYPE_CHECKING

from etude.lazy import load_late

if TYPE_CHECKING:
    from etude.export.hub import save_hub as save_hub
    from etude.export.program import save_onnx as save_onnx, save_program as save_program
    from etude.export.run import FORMATS as FORMATS, Exported as Exported, export_run as export_run
    from etude.export.weights import save_weights as save_weights

__getattr__ = load_late(__name__, __file__)
