"""The input for lingvo users: an input generator with Params."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from lingvo.core import base_input_generator, datasource, py_utils

from . import input as datasets
from .corpus import load_corpus
from .text_copy import user_cache_dir
from .vocabulary import load_vocabulary


class OneBillionWordInput(base_input_generator.BaseInputGenerator):
    """An input generator of packed rows of a corpus, for training or evaluation.

    It works in the graph that `lingvo.trainer` builds (`Initialize(sess)` starts it) and in
    lingvo's eager mode. Batches are NestedMaps of [batch_size, sequence_length] tensors: `ids`,
    `labels`, `segment_ids`, `segment_pos` (int32) and `weights` (float32).

    The held-out text ends with `tf.errors.OutOfRangeError` and starts again after `Reset(sess)`.
    With `eval_samples_per_summary=0` lingvo evaluates all of it.
    """

    @classmethod
    def Params(cls):
        p = super().Params()
        p.name = "one_billion_word_input"
        p.resettable = True
        p.Define("data_dir", None, "Folder with text files; None takes the embedded text.")
        p.Define("train_pattern", None, "Which files below data_dir to train on, a glob.")
        p.Define("heldout_pattern", None, "Which files below data_dir to judge by, a glob.")
        p.Define("vocab_size", 2048, "Number of SentencePiece pieces.")
        p.Define(
            "cache_dir",
            None,
            "Folder of the learned vocabulary; None takes pipemesh in the user's cache folder.",
        )
        p.Define("sequence_length", 128, "Positions of a row.")
        p.Define("heldout", False, "Whether to read the held-out text, once and in order.")
        p.Define("seed", 0, "Equal seeds train on equal batches.")
        return p

    def CreateDatasource(self):
        """Creates a source that reads `Dataset`, which lingvo calls for the first batch."""
        self.CreateChild("datasource", PackedRowsSource.Params())
        self.datasource.SetInputGenerator(self)

    def Dataset(self, num_shards: int = 1, shard: int = 0) -> tf.data.Dataset:
        """Returns the batches, as dicts, of one of `num_shards` hosts.

        It raises CorpusError or VocabularyError for unusable text, InputError for sizes below 1.
        """
        p = self.params
        corpus = load_corpus(p.data_dir, p.train_pattern, p.heldout_pattern)
        vocabulary = load_vocabulary(corpus, p.vocab_size, p.cache_dir or user_cache_dir())
        sizes = {"batch_size": self.InfeedBatchSize(), "sequence_length": p.sequence_length}
        if p.heldout:
            return datasets.heldout_dataset(corpus, vocabulary, **sizes)
        return datasets.train_dataset(
            corpus, vocabulary, seed=p.seed, num_shards=num_shards, shard=shard, **sizes
        )

    def Reset(self, sess=None):
        """Starts again from the first batch."""
        self.datasource.Reset(sess)


class PackedRowsSource(datasource.TFDatasetSource):
    """A data source with the dataset of an `OneBillionWordInput`, one shard for each infeed
    host.
    """

    def GetDataset(self):
        """Returns the dataset of this host, of NestedMaps."""
        generator: Any = self._input_generator
        dataset = generator.Dataset(self.num_hosts, self.host_id)
        return dataset.map(lambda batch: py_utils.NestedMap(batch))
