//! In which order the neurons of each layer lie in the file.

use crate::ids::{LayerId, NeuronId};

/// A permutation of each layer's neurons. Results do not depend on it: a neuron's weights move together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    ffn_hidden: u32,
    neurons: Vec<NeuronId>,
}

impl Placement {
    /// Takes the layers' permutations one behind the other, `ffn_hidden` entries each. Whether they are permutations
    /// of the right number is checked when a bundle is written or opened.
    #[must_use]
    pub fn new(ffn_hidden: u32, neurons: Vec<NeuronId>) -> Placement {
        Placement { ffn_hidden, neurons }
    }

    /// Entry p: which neuron of the source model lies at position p of the layer. Panics if there is no such layer.
    #[must_use]
    pub fn layer(&self, layer: LayerId) -> &[NeuronId] {
        let len = self.ffn_hidden as usize;
        &self.neurons[layer.index() * len..][..len]
    }

    /// All layers, one behind the other.
    pub(crate) fn neurons(&self) -> &[NeuronId] {
        &self.neurons
    }
}
