"""Stubs of the repositories that Bazel would download even for plain Python tests."""

def _files_repository_impl(ctx):
    ctx.file("WORKSPACE", "")
    for path, content in ctx.attr.files.items():
        ctx.file(path, content)

_files_repository = repository_rule(
    implementation = _files_repository_impl,
    attrs = {"files": attr.string_dict(doc = "Content of each file, by its path.")},
)

_PYTHON_DEFS = """
def _tagged(kwargs):
    tags = kwargs.pop("tags", None) or []
    return dict(kwargs, tags = tags + ["__PYTHON_RULES_MIGRATION_DO_NOT_USE_WILL_BREAK__"])

def py_binary(**kwargs):
    native.py_binary(**_tagged(kwargs))

def py_library(**kwargs):
    native.py_library(**_tagged(kwargs))

def py_test(**kwargs):
    native.py_test(**_tagged(kwargs))
"""

_CC_DEFS = """
cc_binary = native.cc_binary
cc_library = native.cc_library
cc_test = native.cc_test
cc_toolchain = native.cc_toolchain
cc_toolchain_suite = native.cc_toolchain_suite
"""

_JAVA_DEFS = """
java_import = native.java_import
java_runtime = native.java_runtime
java_toolchain = native.java_toolchain
"""

_COVERAGE_BUILD = """
package(default_visibility = ["//visibility:public"])

filegroup(name = "coverage_report_generator")

filegroup(name = "lcov_merger")
"""

def _stub(name, files):
    if name not in native.existing_rules():
        _files_repository(name = name, files = files)

def stub_repositories():
    """Declares the stubs; those for Bazel's own rules only where it is older than 5."""
    _stub("rules_python", {"python/BUILD": "", "python/defs.bzl": _PYTHON_DEFS})
    if int(native.bazel_version.split(".")[0] or "0") < 5:
        _stub("rules_cc", {"BUILD": "", "cc/BUILD": "", "cc/defs.bzl": _CC_DEFS})
        _stub("rules_java", {"BUILD": "", "java/BUILD": "", "java/defs.bzl": _JAVA_DEFS})
        _stub("remote_coverage_tools", {"BUILD": _COVERAGE_BUILD})
