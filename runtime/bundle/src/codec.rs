//! Bytes of the small sections: the only use of bincode.
//!
//! Identity, Model, Weights, Tables and Settings are bincode: little endian, integers at full width. So a section's length does not
//! depend on the offsets in it, and a decoder that claims more than the section's cap is stopped. Vectors, Placement
//! and BlockChecksums are plain little-endian arrays, whose lengths follow from the model: nothing in them can lie.

use crate::error::Flaw;
use crate::identity::Identity;
use crate::ids::NeuronId;
use crate::limits::{
    MAX_IDENTITY_BYTES, MAX_MODEL_BYTES, MAX_SETTINGS_BYTES, MAX_TABLES_BYTES, MAX_WEIGHTS_BYTES,
};
use crate::model::{ModelConfig, Vectors, WeightMap};
use crate::placement::Placement;
use crate::tables::{Settings, TableMap};
use crate::validate::named_vectors;
use bincode::config::{Configuration, Fixint, Limit, LittleEndian};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// What bincode codes, with its cap.
pub(crate) trait Coded: Serialize + DeserializeOwned {
    fn encode(&self) -> Vec<u8>;
    /// Never allocates more than a few times the section's cap, whatever lengths the bytes claim.
    fn decode(bytes: &[u8]) -> Result<Self, Flaw>;
}

macro_rules! coded {
    ($type:ty, $max_bytes:expr) => {
        impl Coded for $type {
            fn encode(&self) -> Vec<u8> {
                encode(self)
            }
            fn decode(bytes: &[u8]) -> Result<Self, Flaw> {
                decode::<Self, { $max_bytes }>(bytes)
            }
        }
    };
}

coded!(Identity, MAX_IDENTITY_BYTES);
coded!(ModelConfig, MAX_MODEL_BYTES);
coded!(WeightMap, MAX_WEIGHTS_BYTES);
coded!(TableMap, MAX_TABLES_BYTES);
coded!(Settings, MAX_SETTINGS_BYTES);

fn config<const MAX: usize>() -> Configuration<LittleEndian, Fixint, Limit<MAX>> {
    bincode::config::standard().with_little_endian().with_fixed_int_encoding().with_limit::<MAX>()
}

fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    // The limit binds decoders only.
    bincode::serde::encode_to_vec(value, config::<0>())
        .expect("plain structs, strings and vectors can always be encoded")
}

fn decode<T: DeserializeOwned, const MAX: usize>(bytes: &[u8]) -> Result<T, Flaw> {
    let (value, used) = bincode::serde::decode_from_slice(bytes, config::<MAX>())
        .map_err(|error| format!("it cannot be decoded: {error}"))?;
    if used != bytes.len() {
        return Err(format!("{} bytes behind its end", bytes.len() - used));
    }
    Ok(value)
}

pub(crate) fn encode_vectors(vectors: &Vectors) -> Vec<u8> {
    let layers = vectors.layers.iter().flat_map(named_vectors).map(|(_, values)| values);
    layers
        .chain([&vectors.final_norm[..]])
        .flatten()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

pub(crate) fn encode_placement(placement: &Placement) -> Vec<u8> {
    placement.neurons().iter().flat_map(|neuron| neuron.0.to_le_bytes()).collect()
}

pub(crate) fn encode_checksums(checksums: &[u64]) -> Vec<u8> {
    checksums.iter().flat_map(|checksum| checksum.to_le_bytes()).collect()
}

/// The f32 in `bytes`, whose length is a multiple of 4.
pub(crate) fn floats(bytes: &[u8]) -> Vec<f32> {
    array(bytes, f32::from_le_bytes).collect()
}

/// The neurons in `bytes`, whose length is a multiple of 4.
pub(crate) fn neurons(bytes: &[u8]) -> impl Iterator<Item = NeuronId> + '_ {
    array(bytes, |bytes| NeuronId(u32::from_le_bytes(bytes)))
}

/// The checksums in `bytes`, whose length is a multiple of 8.
pub(crate) fn checksums(bytes: &[u8]) -> impl Iterator<Item = u64> + '_ {
    array(bytes, u64::from_le_bytes)
}

fn array<'a, const N: usize, T>(
    bytes: &'a [u8],
    from: impl Fn([u8; N]) -> T + 'a,
) -> impl ExactSizeIterator<Item = T> + 'a {
    assert!(bytes.len().is_multiple_of(N), "whole items only");
    bytes.chunks_exact(N).map(move |item| from(item.try_into().expect("N bytes")))
}
