"""`clearhead doctor`: list what is installed, and which engines can be used."""

import platform
from importlib import metadata

import typer


def doctor() -> None:
    """List what is installed, and which engines can be used.

    \b
    Examples:
      clearhead doctor
    """
    import torch

    from clearhead.core.engines import choice
    from clearhead.core.engines.cpu import extension
    from clearhead.core.errors import how_to_install
    from clearhead.core.formatting import aligned

    rows = [
        ("clearhead", installed_version("clearhead") or "not installed"),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("torch", f"{torch.__version__}, {torch.get_num_threads()} threads"),
        ("torch uses", torch.backends.cpu.get_cpu_capability()),
        ("gpu", torch.cuda.get_device_name() if torch.cuda.is_available() else "none"),
    ]
    rows += [(f"engine {e.name}", e.caption) for e in choice.ENGINES]
    if tiles := extension.amx_note():
        rows.append(("processor", tiles))
    for package, extra, purpose in (
        ("matplotlib", "plot", "pictures"),
        ("transformers", "hf", "--model"),
        ("starlette", "serve", "clearhead serve"),
        ("triton", "gpu", "kernels on a GPU"),
    ):
        version = installed_version(package)
        missing = f"missing, for {purpose}: {how_to_install(extra)}"
        rows.append((package, missing if version is None else f"{version}, for {purpose}"))
    typer.echo("\n".join(aligned(rows)))


def installed_version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
