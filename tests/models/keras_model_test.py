"""Tests of tff_dpftrl.models.keras_model, and of what custom_model tries out."""

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.models import custom_model, keras_model, keras_versions, table

_T, _V = 6, 17
_SIZES = {"vocabulary_size": _V, "sequence_length": _T}
_WORDS = np.array([[15, 1, 2, 3, 4, 16], [15, 7, 16, 0, 0, 0], [15, 9, 9, 1, 0, 0]], np.int32)

_layers = tf.keras.layers
# Keras 2 has autograph convert what is called; models of Keras 3 loop over tensors by ops.
_RANGE = tf.range if issubclass(tf.keras.Model, tf.Module) else range


def _sequential(*layers, vocabulary_size=_V):
    return tf.keras.Sequential(
        [_layers.Embedding(vocabulary_size, 4), *layers, _layers.Dense(vocabulary_size)]
    )


def _functional():
    words = _layers.Input([_T], dtype=tf.int32)
    twice = _layers.Dense(5, activation="tanh")  # Shared.
    embedded = _layers.Embedding(_V, 5)(words)
    return tf.keras.Model(words, _layers.Dense(_V)(twice(twice(embedded))))


class _Tied(tf.keras.Model):
    """A subclass with a shared matrix, a mask, a constant, and a loop that needs autograph."""

    def __init__(self):
        super().__init__()
        self.embedding = _layers.Embedding(_V, 8, mask_zero=True)
        self.lstm = _layers.LSTM(8, return_sequences=True)
        self.attention = _layers.MultiHeadAttention(2, 4)
        self.convolution = _layers.Conv1D(8, 2, padding="causal")
        self.norm = _layers.LayerNormalization()
        self.bias = self.add_weight(name="bias", shape=[_V])
        # Keras 3 trains no other variables than its own.
        self.scales = [
            self.add_weight(name="scale", shape=[8], dtype="float32", initializer="ones")
            for _ in range(2)
        ]
        # Large enough not to be made a part of the graph by itself.
        self.places = tf.constant(np.random.default_rng(0).normal(size=[_T, 8, 8]), tf.float32)

    def call(self, words, training=False):
        x = self.embedding(words)
        x = self.lstm(x) + tf.einsum("bti,tij->btj", x, self.places) * self.scales[0]
        x = (
            self.norm(x + self.convolution(x) + self.attention(x, x, use_causal_mask=True))
            * self.scales[1]
        )
        for _ in _RANGE(2):
            x = tf.tanh(x)
        return tf.matmul(x, self.embedding.embeddings, transpose_b=True) + self.bias


_MODELS = {
    "sequential": lambda: _sequential(_layers.LSTM(5, return_sequences=True)),
    "functional": _functional,
    "subclass": _Tied,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", _MODELS)
def test_scores_and_gradients_are_those_of_the_keras_model(name):
    theirs = _MODELS[name]()
    ours = keras_model.read(theirs, **_SIZES)
    # It is a copy: the model that was given can change.
    weights = [tf.constant(weight) for weight in ours.initial_weights(0)]
    for variable in theirs.trainable_variables:
        assert type(keras_versions.tensorflow_variable(variable)) is type(tf.Variable(0.0))
        variable.assign(tf.random.stateless_normal(variable.shape, [1, 2]))
    assert ours.num_parameters == theirs.count_params()
    assert any(np.any(w != v) for w, v in zip(weights, theirs.get_weights(), strict=True))
    weights = [tf.constant(v) for v in theirs.trainable_variables]
    np.testing.assert_allclose(ours.logits(weights, _WORDS), theirs(_WORDS), rtol=1e-5, atol=1e-6)

    @tf.function
    def gradients():
        with tf.GradientTape() as tape:
            tape.watch(weights)
            total = tf.reduce_sum(tf.sin(ours.compact_logits(weights, _WORDS)[0]))
        return [tf.convert_to_tensor(g) for g in tape.gradient(total, weights)]

    with tf.GradientTape() as tape:
        total = tf.reduce_sum(tf.boolean_mask(tf.sin(theirs(_WORDS)), _WORDS != 0))
    expected = tape.gradient(total, theirs.trainable_variables)
    for found, gradient in zip(gradients(), expected, strict=True):
        gradient = tf.convert_to_tensor(gradient)
        np.testing.assert_allclose(found, gradient, rtol=1e-4, atol=1e-5)
        assert np.any(gradient != 0)


def test_names_do_not_depend_on_what_was_built_before():
    first, second = (keras_model.read(_functional(), **_SIZES) for _ in range(2))
    assert first.shapes == second.shapes and first.probe == second.probe
    names = ["embedding/embeddings", "dense/kernel", "dense/bias", "dense/kernel#2", "dense/bias#2"]
    assert list(first.weight_shapes) == names
    # A model may call its own weight "file", which is an argument of `np.savez`.
    assert list(keras_model._named([tf.Variable([1.0], name="file")])) == ["weight/file"]


def test_a_record_tells_models_apart():
    model = keras_model.read(_sequential(_layers.Dense(4, "relu")), **_SIZES)
    record = table.from_description(table.describe(model))
    assert isinstance(record, custom_model.Fingerprint) and not isinstance(
        record, custom_model.CustomModel
    )
    assert record.weight_shapes == model.weight_shapes
    # Other initial weights are no other model.
    record.check_same(keras_model.read(_sequential(_layers.Dense(4, "relu")), **_SIZES))
    for layers, message in (
        ([_layers.Dense(4, "tanh")], "computes something else"),
        ([_layers.Dense(5, "relu")], r"of shape \[4, 5\] where that of the run has .* \[4, 4\]"),
        ([_layers.Dense(4, "relu"), _layers.Dense(4)], "model has .*that of the run"),
    ):
        with pytest.raises(ValueError, match=message):
            record.check_same(keras_model.read(_sequential(*layers), **_SIZES))
    longer = keras_model.read(
        _sequential(_layers.Dense(4, "relu")), vocabulary_size=_V, sequence_length=_T + 1
    )
    with pytest.raises(ValueError, match="sequence_length 7, that of the run 6"):
        record.check_same(longer)
    for use in (lambda: record.initial_weights(0), lambda: record.logits((), _WORDS)):
        with pytest.raises(ValueError, match="give it as the argument `model`"):
            use()
    with pytest.raises(ValueError, match="incomplete"):
        table.from_description({"model": "own"})


class _Stateful(tf.keras.Model):
    """Decorated, and called before: the graph has the variables inside."""

    def __init__(self):
        super().__init__()
        self.inner = _sequential()

    @tf.function
    def call(self, words, training=False):
        return self.inner(words)


class _Whole(tf.keras.Model):
    """Sees something of its batch, or of the future, that it should not."""

    def __init__(self, axis):
        super().__init__()
        self.inner, self.axis = _sequential(), axis

    def call(self, words, training=False):
        scores = self.inner(words)
        return scores + tf.reduce_mean(scores, axis=self.axis, keepdims=True)


class _SeesSecondWord(tf.keras.Model):
    """Looks ahead at the first position only."""

    def __init__(self):
        super().__init__()
        self.inner = _sequential()

    def call(self, words, training=False):
        scores = self.inner(words)
        return tf.concat([scores[:, :1] + scores[:, 1:2], scores[:, 1:]], axis=1)


class _Unused(tf.keras.Model):
    """Has a weight that nothing depends on."""

    def __init__(self):
        super().__init__()
        self.inner, self.other = _sequential(), self.add_weight(name="other", shape=[2])

    def call(self, words, training=False):
        return self.inner(words)


class _OutsideVariable(tf.keras.Model):
    """Reads a variable that Keras does not know of."""

    def __init__(self, variable):
        super().__init__()
        self.inner, self.read = _sequential(), lambda: variable * 2.0

    def call(self, words, training=False):
        return self.inner(words) + self.read()


def _frozen():
    model = _sequential(_layers.Dense(4))
    model.layers[0].trainable = False
    return model


def _of_dtype(dtype):
    return lambda: tf.keras.Sequential(
        [_layers.Embedding(_V, 4, dtype=dtype), _layers.Dense(_V, dtype=dtype)]
    )


_REFUSED = {
    "softmax": (
        lambda: tf.keras.Sequential([_sequential(), _layers.Softmax()]),
        "returns probabilities, .*: leave out the softmax",
    ),
    "batch normalisation": (
        lambda: _sequential(_layers.BatchNormalization(name="norm")),
        "the layer norm keeps statistics or words of data",
    ),
    "constant statistics": (
        lambda: _sequential(_layers.Normalization(mean=0.0, variance=1.0)),
        "the layer normalization.* keeps statistics or words of data",
    ),
    "frozen": (_frozen, "embeddings is not: .*let all layers be trainable"),
    "random": (
        lambda: _sequential(_layers.Lambda(lambda x: x + tf.random.normal([4]))),
        "something else at every call",
    ),
    "dropout": (lambda: _sequential(_layers.Dropout(0.5)), "something else in training .*dropout"),
    "words only": (
        lambda: _sequential(vocabulary_size=_V - 4),
        rf"\[batch, {_T}, {_V}\], got .*: {_V} ids are the {_V - 4} words .* four special",
    ),
    "too few embeddings": (
        lambda: tf.keras.Sequential([_layers.Embedding(_V - 4, 4), _layers.Dense(_V)]),
        f"fails on ids from 0 to {_V - 1}",
    ),
    "last state": (lambda: _sequential(_layers.LSTM(5)), "return_sequences=True"),
    "other length": (
        lambda: tf.keras.Sequential(
            [
                _layers.Input([_T + 1]),
                _layers.Embedding(_V, 4),
                _layers.Flatten(),
                _layers.Dense(_V),
            ]
        ),
        rf"cannot be applied to word ids, int32 of shape \[batch, {_T}\]",
    ),
    "double precision": (_of_dtype("float64"), "weights of float32, but .* is of float64"),
    "mixed precision": (_of_dtype("mixed_float16"), "without a mixed-precision policy"),
    "regulariser": (lambda: _sequential(_layers.Dense(4, kernel_regularizer="l2")), "adds losses"),
    "constraint": (lambda: _sequential(_layers.Dense(4, kernel_constraint="non_neg")), "constrai"),
    "mean over positions": (lambda: _Whole(axis=1), "looks ahead: .*causal mask"),
    "one position": (_SeesSecondWord, "looks ahead: "),
    "mean over sequences": (lambda: _Whole(axis=0), "depend on that sequence only"),
    "unused weight": (_Unused, "do not depend on its weight .*other"),
    "tf.function": (_Stateful, "@tf.function"),
    "outside": (lambda: _OutsideVariable(tf.Variable(1.0)), "not one of its trainable weights"),
    "no weights": (
        lambda: tf.keras.Sequential([_layers.Lambda(lambda w: tf.one_hot(w, _V))]),
        "no trainable weight",
    ),
}


@pytest.mark.parametrize("make, message", _REFUSED.values(), ids=_REFUSED)
def test_what_cannot_be_trained_is_refused_with_the_remedy(make, message):
    model = make()
    with pytest.raises(ValueError, match=message):
        keras_model.read(model, **_SIZES)
    # The model is still its owner's.
    kept = map(keras_versions.tensorflow_variable, model.variables)
    assert all("Replaced" not in type(variable).__name__ for variable in kept)


@pytest.mark.parametrize(
    "layer",
    [
        _layers.Normalization(),
        _layers.Discretization([0.0, 1.0]),
        _layers.TextVectorization(vocabulary=["so"], output_mode="tf_idf", idf_weights=[1.0]),
        _layers.StringLookup(vocabulary=["so"]),
        _layers.IntegerLookup(vocabulary=[1]),
        _layers.BatchNormalization(),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_with_statistics_are_found_however_deep(layer):
    model = tf.keras.Sequential([tf.keras.Sequential([tf.keras.Sequential([layer])])])
    assert layer.name in keras_versions.statistics_layers(model)


def test_other_layers_have_no_statistics():
    layers = [_layers.Rescaling(2.0), _layers.LayerNormalization(), _layers.RandomFlip()]
    layers += [_layers.CategoryEncoding(3), _layers.Hashing(3), _layers.LSTM(3)]
    assert not keras_versions.statistics_layers(tf.keras.Sequential(layers))


def test_weights_that_are_not_finite_are_refused():
    model = _sequential()
    model(_WORDS)
    model.layers[0].embeddings.assign(tf.fill([_V, 4], np.nan))
    with pytest.raises(ValueError, match="embeddings, which is not finite"):
        keras_model.read(model, **_SIZES)
