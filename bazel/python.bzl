"""One library a package, one test a file and one a folder, without a list to forget to extend."""

load("@rules_python//python:defs.bzl", "py_library", "py_test")

def package_library(deps = [], data = []):
    """Declares the library of a folder: all its Python files, and those of folders without a BUILD.

    Args:
      deps: Libraries of our own that it imports.
      data: Files it reads at run time.
    """
    py_library(
        name = native.package_name().split("/")[-1],
        srcs = native.glob(["**/*.py"]),
        data = data + native.glob(["**/*.pyi"]),
        visibility = ["//visibility:public"],
        deps = deps,
    )

def package_tests(deps, data = []):
    """Declares a `py_test` for every `*_test.py` of a folder, and `helpers`, its other files.

    `run_folder.py` starts each: a test file needs no lines to start itself.

    `all_tests` runs all of them in one process, which imports TensorFlow once. Only
    `--test_tag_filters=folder` chooses it, in place of the others.

    Args:
      deps: Libraries of our own that the tests import.
      data: Files that the tests read.
    """
    helpers = native.glob(["**/*.py"], exclude = ["**/*_test.py", "conftest.py", "run_folder.py"])
    py_library(
        name = "helpers",
        srcs = helpers,
        visibility = ["//tests:__subpackages__"],
        deps = deps,
    )
    sources = native.glob(["**/*_test.py"])
    py_test(
        name = "all_tests",
        size = "enormous",
        srcs = ["//tests:run_folder.py"] + sources + helpers,
        args = ["$(rootpath %s)" % source for source in sources],
        data = data + ["//:pyproject.toml"],
        main = "//tests:run_folder.py",
        tags = ["folder"],
        deps = deps + ["//tests:conftest"],
    )
    for source in sources:
        py_test(
            name = source[:-len(".py")],
            size = "large",
            srcs = ["//tests:run_folder.py", source] + helpers,
            args = ["$(rootpath %s)" % source],
            data = data + ["//:pyproject.toml"],
            main = "//tests:run_folder.py",
            deps = deps + ["//tests:conftest"],
        )
