"""What people read of a results folder: README, report as one page, comparison of runs.

Everything here is read from the files of a finished folder, without TensorFlow. `results` reads
them: by default only what may be published, so that nothing private can reach a README, a model
card or a page; with `private=True` also exact figures of the training users, for the operator.

    files       which file of a folder is what, and who may see it: the one table
    results     the facts in a folder
    readme      README.md of a folder, which is the model card too
    page        report.html of a folder: one file, without scripts and without references
    comparison  the differences of several folders, as text and as a page
"""
