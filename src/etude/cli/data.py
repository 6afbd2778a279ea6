"""The commands about data: `etude tokenize`, `etude data check` and `etude data show`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

if TYPE_CHECKING:
    from etude.corpus import CorpusReport

data_app = typer.Typer(help="Check and show token files.", no_args_is_help=True)


def tokenize(
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="INPUTS",
            help="Files, folders, patterns, .jsonl, .gz [default: stdlib, the source of Python's standard library].",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the token files.")] = Path("data/tokenized"),
    vocab_size: Annotated[int, typer.Option(help="Vocabulary size of the trained tokenizer.")] = 8192,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Use this tokenizer.json, or a folder with one, instead of training a tokenizer."),
    ] = None,
    end_token: Annotated[
        str | None, typer.Option(help="Token that ends a document, if the tokenizer does not define one.")
    ] = None,
    validation: Annotated[float, typer.Option(help="Share of the documents for validation.")] = 0.05,
    test: Annotated[float, typer.Option(help="Share of the documents for the test split.")] = 0.05,
    salt: Annotated[str, typer.Option(help="Change it to get another split and order.")] = "",
    text_key: Annotated[str, typer.Option(help="Key of the text in JSONL files.")] = "text",
    include: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Pattern of files to include from folders [default: text and code]."),
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Pattern of files to exclude from folders.")
    ] = None,
    min_chars: Annotated[int, typer.Option(help="Drop shorter documents.")] = 1,
    max_chars: Annotated[int | None, typer.Option(help="Drop longer documents.")] = None,
    cut_chars: Annotated[int | None, typer.Option(help="Split longer documents at line ends.")] = None,
    keep_duplicates: Annotated[bool, typer.Option("--keep-duplicates", help="Keep duplicate documents.")] = False,
    tokenizer_bytes: Annotated[
        int, typer.Option(help="Train the tokenizer on a sample of at most this much text.")
    ] = 100_000_000,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing corpus in the folder.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Create train, validation and test token files from text, code or JSONL.

    The files depend only on the documents' content and the options. If interrupted, run it again with the same
    arguments to continue.
    """
    from etude.corpus import prepare_corpus

    with _Progress(quiet) as progress:
        report = prepare_corpus(
            inputs or [],
            out,
            overwrite=overwrite,
            progress=progress,
            vocab_size=vocab_size,
            tokenizer=tokenizer,
            end_token=end_token,
            validation=validation,
            test=test,
            salt=salt,
            text_key=text_key,
            include=tuple(include or ()),
            exclude=tuple(exclude or ()),
            min_chars=min_chars,
            max_chars=max_chars,
            cut_chars=cut_chars,
            keep_duplicates=keep_duplicates,
            tokenizer_bytes=tokenizer_bytes,
        )
    _print_report(report)


Format = Annotated[str, typer.Option(help="auto, or the format of another tool's file.")]
Dtype = Annotated[str | None, typer.Option(help="Dtype of the ids in a file without a header, such as uint16.")]
DocumentEnd = Annotated[
    int | None, typer.Option(help="Id that ends a document, in a file without document boundaries.")
]


@data_app.command("check")
def check(
    files: Annotated[list[str], typer.Argument(metavar="FILE", help="Token files.")],
    format: Format = "auto",
    dtype: Dtype = None,
    document_end: DocumentEnd = None,
) -> None:
    """Verify token files: their structure, checksums and ids."""
    from etude.data.tokens.check import check_tokens

    for file in files:
        report = check_tokens(file, format=format, dtype=dtype, document_end=document_end)
        checksums = "checksums match" if report.checksums else "the format has no checksums"
        print(f"{report.path}: intact; {report.format}, {report.dtype}, {checksums}")
        print(
            f"  {report.num_tokens:,} tokens in {report.num_samples:,} samples of {report.shortest:,} to "
            f"{report.longest:,} tokens, {report.mean_length:,.1f} on average"
        )
        vocabulary = "" if report.vocab_size is None else f" of a vocabulary of {report.vocab_size:,}"
        print(f"  largest id {'none' if report.largest_id is None else f'{report.largest_id:,}'}{vocabulary}")
        for name, found in (("streams", report.streams), ("labels", report.sample_labels)):
            if found:
                print(f"  {name}: {', '.join(found)}")


@data_app.command("show")
def show(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A token file with tokenizer.json beside it.")],
    sample: Annotated[
        int, typer.Option(help="Index of the document, from 0; negative indices count from the end.")
    ] = 0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Show at most this many tokens.")] = 500,
) -> None:
    """Print a document of a token file as text."""
    from etude.core.errors import DataError
    from etude.corpus import load_tokenizer
    from etude.data.tokens.opening import open_tokens

    tokens = open_tokens(file)
    if not -len(tokens) <= sample < len(tokens):
        raise DataError(
            f"{file} has {len(tokens):,} documents; choose an index from 0 to {len(tokens) - 1}, not {sample}"
        )
    ids = tokens[sample % len(tokens)].ids
    text = load_tokenizer(Path(file).parent).decode(ids[:max_tokens].tolist(), skip_special_tokens=False)
    more = f", of which the first {max_tokens:,} are shown" if len(ids) > max_tokens else ""
    print(f"document {sample % len(tokens):,} of {len(tokens):,}: {len(ids):,} tokens{more}")
    print(text)


def _print_report(report: "CorpusReport") -> None:
    if report.reused:
        print(f"{report.folder} already exists, made from the same documents with the same options")
    else:
        print(f"made {report.folder}: a vocabulary of {report.vocab_size:,}, ids as {report.dtype}")
    print(f"  {'split':<12}{'documents':>12}{'tokens':>16}{'bytes':>16}{'bytes/token':>13}")
    for name, split in report.splits.items():
        counts = f"{split.documents:>12,}{split.tokens:>16,}{split.bytes:>16,}{split.bytes_per_token:>13.2f}"
        print(f"  {name:<12}{counts}")
    loss = report.validation_unigram_loss
    beat = "" if loss is None else f", {loss:.3f} on validation; a model must do better"
    print(f"  unigram entropy {report.unigram_entropy:.3f} nats per token{beat}")
    left_out = {"duplicates": report.num_duplicates, **report.skipped}
    if any(left_out.values()):
        print("  left out: " + ", ".join(f"{count:,} {reason}" for reason, count in left_out.items() if count))


class _Progress:
    """Shows progress: a bar on a terminal, a line per stage elsewhere, nothing if quiet."""

    def __init__(self, quiet: bool) -> None:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description:<24}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self._prints = not quiet and not sys.stdout.isatty()
        self._bars = Progress(*columns, disable=quiet or self._prints)
        self._steps: dict[str, Any] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __call__(self, step: str, done: int, total: int) -> None:
        if step not in self._steps:
            self._finish_step()
            self._steps[step] = self._bars.add_task(step)
            if self._prints:
                print(f"{step} …", flush=True)
        self._bars.update(self._steps[step], completed=done, total=total or None)

    def _finish_step(self) -> None:
        for task in list(self._steps.values())[-1:]:
            self._bars.update(task, completed=1, total=1)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._finish_step()
        self._bars.stop()
