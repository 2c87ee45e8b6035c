"""Why an import fails: a file that hides a module, or a package that is missing or too old.

Until it knows that nothing is hidden, this module imports only what Python loads when it starts.
"""

import os
import sys

IMPORT_ERRORS = (ImportError, AttributeError)  # the latter if a file hides a module


def explain_import(error: BaseException) -> str | None:
    """One line for a failed import; None if nothing is hidden, missing or too old."""
    for folder in {os.path.abspath(sys.path[0]), os.getcwd()}:
        for name, module in list(sys.modules.items()):
            file, stem = getattr(module, "__file__", None), f"{folder}/{name}"
            if file in (f"{stem}.py", f"{stem}/__init__.py") and _is_elsewhere(name, folder):
                return f"{file} hides the module {name}; rename it, or work in another folder"
    if not isinstance(error, ImportError):
        return None
    from t5x_diffeq.system import extras

    lacking, missing = extras.find_lacking(), _missing_module(error) or "t5x_diffeq"
    if not lacking and missing == "t5x_diffeq":
        return None
    command = extras.install_command("" if lacking else extras.EXTRAS.get(missing, ""))
    return f"this Python, {sys.executable}, lacks {', '.join(lacking or [missing])}; {command}"


def raise_explained(error: Exception) -> None:
    """Raises an ImportError that explains a failed import, or else the error itself."""
    if (why := explain_import(error)) is None:
        raise error
    if sys.argv[0] == "-m":  # Python is looking for the verb, and would print a traceback
        sys.stderr.write(f"error: {why}\n")
        sys.exit(2)
    raise ImportError(why) from error


def _is_elsewhere(name: str, folder: str) -> bool:
    """Whether Python or another folder of the path has a module of this name."""
    if name in sys.stdlib_module_names:  # which may be no .py file, as math
        return True
    others = {os.path.abspath(each) for each in sys.path if name != "t5x_diffeq"} - {folder}
    return any(os.path.exists(f"{each}/{name}{end}") for each in others for end in ("", ".py"))


def _missing_module(error: BaseException | None) -> str | None:
    """The package whose absence caused an error, which may be another library's."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name:
            return error.name.partition(".")[0]
        error = error.__cause__ or error.__context__
    return None
