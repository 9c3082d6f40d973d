//! The same model in every format gives the same bundle.

use crate::fixture::gguf::{BF16, F16, F32, GgufFile, Meta};
use crate::fixture::vocabulary::{END_OF_TEXT, IM_END, IM_START, byte_level};
use crate::fixture::{TinyModel, data, folder, import_f16, options, quantised};
use half::f16;
use ls_bundle::Bundle;
use ls_bundle::ids::LayerId;
use ls_bundle::model::{Architecture, DType, RopeScaling, WeightTypes};
use ls_prep::model::roles::{Part, Role};
use std::path::PathBuf;
use tempfile::TempDir;

fn gguf_bundle(dir: &TempDir, model: &TinyModel, type_id: u32) -> Bundle {
    let path = dir.path().join(format!("model-{type_id}.gguf"));
    let file = GgufFile::of(model, &byte_level("smollm"), type_id);
    std::fs::write(&path, file.write().bytes).unwrap();
    let bundle = import_f16(&path).unwrap();
    bundle.verify(&mut |_, _| {}).unwrap();
    bundle
}

fn folder_path(dir: &TempDir, model: &TinyModel, shards: usize) -> PathBuf {
    let path = dir.path().join(format!("folder-{shards}"));
    std::fs::create_dir(&path).unwrap();
    folder::write(&path, model, &byte_level("smollm"), shards);
    path
}

#[test]
fn gguf_and_folder_give_the_same_weights_vectors_and_tokens() {
    for architecture in [Architecture::Llama, Architecture::Qwen2, Architecture::Qwen3] {
        for tied in [true, false] {
            let dir = TempDir::new().unwrap();
            let model = TinyModel::new(architecture, tied);
            let from_gguf = gguf_bundle(&dir, &model, F32);
            let from_folder = import_f16(&folder_path(&dir, &model, 1)).unwrap();
            assert!(data(&from_gguf) == data(&from_folder), "{architecture:?}, tied: {tied}");
            assert_eq!(from_gguf.vectors(), from_folder.vectors());
            assert_eq!(from_gguf.vocabulary(), from_folder.vocabulary());
            assert_eq!(from_gguf.tokenizer(), from_folder.tokenizer());
            let mut config = from_folder.model().clone();
            assert_eq!(config.special.stop, [IM_END]);
            config.name = "tiny".to_owned();
            assert_eq!(&config, from_gguf.model());
            assert_eq!(from_folder.chat_template(), Some("{{ messages }}"));
        }
    }
}

#[test]
fn mistral_folders_keep_their_window() {
    let dir = TempDir::new().unwrap();
    let model = TinyModel::new(Architecture::Mistral, false);
    let path = folder_path(&dir, &model, 1);
    let mut config = folder::config_json(&model.config);
    config["sliding_window"] = 64.into();
    std::fs::write(path.join("config.json"), config.to_string()).unwrap();
    let bundle = import_f16(&path).unwrap();
    assert_eq!(bundle.model().architecture, Architecture::Mistral);
    assert_eq!(bundle.model().sliding_window, Some(64));
}

#[test]
fn float_types_and_sharding_make_no_difference() {
    let dir = TempDir::new().unwrap();
    let mut model = TinyModel::new(Architecture::Llama, true);
    // bf16 keeps 8 bits: round first, so that all three types hold the same numbers.
    for tensor in &mut model.tensors {
        tensor
            .values
            .iter_mut()
            .for_each(|value| *value = half::bf16::from_f32(*value * 0.5).to_f32());
    }
    let wanted = data(&gguf_bundle(&dir, &model, F32));
    for type_id in [F16, BF16] {
        assert!(data(&gguf_bundle(&dir, &model, type_id)) == wanted, "type {type_id}");
    }
    assert!(data(&import_f16(&folder_path(&dir, &model, 3)).unwrap()) == wanted, "three shards");
}

#[test]
fn blocks_hold_gate_row_up_row_and_down_column() {
    let dir = TempDir::new().unwrap();
    let model = TinyModel::new(Architecture::Llama, true);
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, GgufFile::of(&model, &byte_level("smollm"), F32).write().bytes).unwrap();
    for block_neurons in [1, 3] {
        let options = ls_prep::import::ImportOptions { block_neurons, ..options(&path) };
        ls_prep::import::import(&options, &mut ()).unwrap();
        let bundle = Bundle::open(&options.out).unwrap();
        let file = std::fs::read(&options.out).unwrap();
        for layer in 0..2u16 {
            let ffn = bundle.weights().layers[LayerId(layer).index()].ffn;
            for neuron in 0..ffn.neurons {
                let (_, block) = ffn.block(neuron / block_neurons);
                let start = block.offset + u64::from(neuron % block_neurons) * ffn.neuron_bytes();
                let bytes = &file[start as usize..][..ffn.neuron_bytes() as usize];
                let found =
                    bytes.as_chunks().0.iter().map(|half| f16::from_le_bytes(*half).to_f32());
                assert!(found.eq(model.neuron(layer, neuron as usize).concat()), "neuron {neuron}");
            }
        }
    }
}

#[test]
fn every_quantised_type_decodes_as_candle_does() {
    let dir = TempDir::new().unwrap();
    // Rows must be a whole number of 256-value blocks for the K types; queries are 4 x 64 wide.
    let mut model = TinyModel::new(Architecture::Llama, true);
    let config = &mut model.config;
    (config.hidden, config.ffn_hidden, config.head_dim) = (256, 512, 64);
    let mut state = 7;
    model.tensors = Role::all(&model.config)
        .into_iter()
        .map(|(role, shape)| {
            let count: u32 = shape.iter().product();
            let value = |_| (crate::fixture::next_random(&mut state) % 2001) as f32 / 1000.0 - 1.0;
            crate::fixture::TinyTensor { role, shape, values: (0..count).map(value).collect() }
        })
        .collect();
    for type_id in [2, 3, 6, 7, 8, 10, 11, 12, 13, 14] {
        let found = data(&gguf_bundle(&dir, &model, type_id));
        let mut rounded = TinyModel { config: model.config.clone(), tensors: Vec::new() };
        for tensor in &model.tensors {
            // What candle makes of the tensor as a whole; row order does not matter to it.
            let decode = tensor.shape.len() > 1;
            let values =
                if decode { quantised(type_id, &tensor.values).1 } else { tensor.values.clone() };
            let (role, shape) = (tensor.role, tensor.shape.clone());
            rounded.tensors.push(crate::fixture::TinyTensor { role, shape, values });
        }
        assert!(found == data(&gguf_bundle(&dir, &rounded, F32)), "type {type_id}");
    }
}

#[test]
fn quantised_bundles_hold_their_types_and_dense_and_ffn_are_set_apart() {
    let dir = TempDir::new().unwrap();
    let model = TinyModel::new(Architecture::Llama, false);
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, GgufFile::of(&model, &byte_level("smollm"), F32).write().bytes).unwrap();
    let types = WeightTypes { attention: DType::Q4_0, ffn: DType::Q4_0, embedding: DType::Q8_0 };
    let options = ls_prep::import::ImportOptions { types, ..options(&path) };
    let report = ls_prep::import::import(&options, &mut ()).unwrap();
    let bundle = Bundle::open(&options.out).unwrap();
    bundle.verify(&mut |_, _| {}).unwrap();
    let weights = bundle.weights();
    let layer = &weights.layers[1];
    assert_eq!((layer.q_proj.dtype, layer.ffn.dtype), (DType::Q4_0, DType::Q4_0));
    assert_eq!(weights.embedding.dtype, DType::Q8_0);
    assert_eq!(
        bundle.identity().recipe,
        "dtype = \"q4_0\"\nffn_dtype = \"q4_0\"\nembedding_dtype = \"q8_0\"\nblock_neurons = 2\n"
    );
    assert_eq!(report.bundle_bytes, bundle.total_len());
    assert_eq!(report.blocks, bundle.block_count());
    // The down column of neuron 5 was quantised along the hidden dimension.
    let ffn = weights.layers[0].ffn;
    let (_, block) = ffn.block(2);
    let row_bytes = ffn.dtype.row_bytes(ffn.hidden) as usize;
    let start = block.offset as usize + 3 * row_bytes + 2 * row_bytes;
    let mut wanted = vec![0; row_bytes];
    ls_prep::encode::encode_row(ffn.dtype, &model.neuron(0, 5)[2], &mut wanted).unwrap();
    assert_eq!(std::fs::read(&options.out).unwrap()[start..][..row_bytes], wanted);
}

#[test]
fn same_inputs_and_seed_give_the_same_bytes_and_another_seed_does_not() {
    let dir = TempDir::new().unwrap();
    let model = TinyModel::new(Architecture::Qwen2, true);
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, GgufFile::of(&model, &byte_level("smollm"), F16).write().bytes).unwrap();
    let made = |seed, name: &str| {
        let options =
            ls_prep::import::ImportOptions { seed, out: dir.path().join(name), ..options(&path) };
        ls_prep::import::import(&options, &mut ()).unwrap();
        std::fs::read(&options.out).unwrap()
    };
    let first = made(1, "a.lsb");
    assert!(first == made(1, "b.lsb"));
    assert!(first != made(2, "c.lsb"));
    let source_hash = blake3::hash(&std::fs::read(&path).unwrap()).to_hex().to_string();
    assert_eq!(
        Bundle::open(&dir.path().join("a.lsb")).unwrap().identity().source_hash,
        source_hash
    );
}

#[test]
fn a_folders_hash_covers_the_bytes_of_every_file() {
    let dir = TempDir::new().unwrap();
    let path = folder_path(&dir, &TinyModel::new(Architecture::Llama, true), 2);
    let hash = || import_f16(&path).unwrap().identity().source_hash.clone();
    let mut hashes = vec![hash()];
    assert_eq!(hashes[0], hash());
    for name in ["config.json", "tokenizer.json", "generation_config.json", "tokenizer_config.json"]
    {
        // A space more changes nothing but the bytes.
        let mut text = std::fs::read(path.join(name)).unwrap();
        text.push(b' ');
        std::fs::write(path.join(name), text).unwrap();
        hashes.push(hash());
    }
    let shard = path.join("model-00002-of-00002.safetensors");
    let mut weights = std::fs::read(&shard).unwrap();
    *weights.last_mut().unwrap() ^= 1;
    std::fs::write(&shard, weights).unwrap();
    hashes.push(hash());
    hashes.sort();
    hashes.dedup();
    assert_eq!(hashes.len(), 6);
}

#[test]
fn special_tokens_follow_the_metadata() {
    let dir = TempDir::new().unwrap();
    let model = TinyModel::new(Architecture::Llama, true);
    let special = |changes: &[(&str, Meta)]| {
        let mut file = GgufFile::of(&model, &byte_level("smollm"), F16);
        for (key, value) in changes {
            file.set(&format!("tokenizer.ggml.{key}"), Some(value.clone()));
        }
        let path = dir.path().join("model.gguf");
        std::fs::write(&path, file.write().bytes).unwrap();
        import_f16(&path).unwrap().model().special.clone()
    };
    let plain = special(&[]);
    assert_eq!((plain.bos, plain.add_bos, plain.stop), (Some(IM_START), false, vec![IM_END]));
    let all = special(&[
        ("add_bos_token", Meta::Bool(true)),
        ("eos_token_id", Meta::U32(5)),
        ("eot_token_id", Meta::U32(7)),
        ("padding_token_id", Meta::U32(END_OF_TEXT)),
    ]);
    assert_eq!((all.add_bos, all.stop), (true, vec![END_OF_TEXT, IM_END, 5, 7]));
}

#[test]
fn rotary_scaling_comes_through_both_ways() {
    let dir = TempDir::new().unwrap();
    let mut model = TinyModel::new(Architecture::Llama, true);
    model.config.rope.scaling = RopeScaling::Linear { factor: 4.0 };
    assert_eq!(gguf_bundle(&dir, &model, F16).model().rope, model.config.rope);
}

#[test]
fn numbers_beyond_half_precision_name_their_tensor() {
    let dir = TempDir::new().unwrap();
    for (value, wanted) in
        [(70_000.0, "beyond half precision"), (f32::NAN, "NaN"), (f32::INFINITY, "inf")]
    {
        let mut model = TinyModel::new(Architecture::Llama, true);
        model.tensor(Role::Layer(1, Part::Down)).values[333] = value;
        let path = dir.path().join("model.gguf");
        std::fs::write(&path, GgufFile::of(&model, &byte_level("smollm"), F32).write().bytes)
            .unwrap();
        let error = import_f16(&path).unwrap_err().to_string();
        assert!(error.contains("`blk.1.ffn_down.weight`") && error.contains(wanted), "{error}");
        assert!(!path.with_extension("lsb").exists());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary file is left");
    }
}
