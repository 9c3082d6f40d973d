//! What is written is what is read.

mod sample;

use ls_bundle::ids::{BlockId, LayerId, NeuronId, TokenId};
use ls_bundle::model::{Architecture, DType, ModelConfig, RopeScaling, WeightTypes};
use ls_bundle::placement::Placement;
use ls_bundle::tables::{TABLE_BLOCK_BYTES, TableExtent, TableKind};
use ls_bundle::vocabulary::{TokenKind, Vocabulary};
use ls_bundle::{BlockChecksums, Bundle, BundleParts, BundleWriter, ErrorClass, plan_weights};
use proptest::prelude::*;
use std::fs;

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

#[test]
fn a_tiny_bundle_comes_back_whole() {
    let folder = folder();
    let path = folder.path().join("tiny.lsb");
    let parts = sample::tiny_parts();
    let data = sample::write(&path, parts.clone(), 1).unwrap();
    check(&path, &parts, &data);
}

#[test]
fn what_was_learned_comes_back() {
    let folder = folder();
    let path = folder.path().join("tiny.lsb");
    let parts = sample::learned(sample::tiny_parts(), TABLE_BLOCK_BYTES + 1);
    let data = sample::write(&path, parts.clone(), 1).unwrap();
    check(&path, &parts, &data);
    let bundle = Bundle::open(&path).unwrap();
    assert_eq!(bundle.settings(), parts.settings);
    let base = *bundle.tables().find(LayerId(0), TableKind::Base).unwrap();
    assert_eq!((base.blocks(), base.len), (2, TABLE_BLOCK_BYTES + 1));
    let read = bundle.read_table(LayerId(0), TableKind::Base).unwrap().unwrap();
    let start = (base.offset - bundle.data_extent().offset) as usize;
    assert!(read == data[start..][..base.len as usize]);
    assert_eq!(bundle.read_table(LayerId(1), TableKind::Base).unwrap(), None);
    let names: Vec<_> = bundle.blocks().map(|block| block.name.to_string()).collect();
    assert_eq!(names[20], "layer 0 base block 1");
}

#[test]
fn tables_are_checked_before_they_are_written() {
    let folder = folder();
    let check = |wanted: &str, lie: fn(&mut Vec<TableExtent>)| {
        let mut parts = sample::learned_parts();
        lie(&mut parts.tables.as_mut().unwrap().tables);
        let path = folder.path().join("tiny.lsb");
        let error = BundleWriter::create(&path, parts).unwrap_err().to_string();
        assert!(error.contains(wanted), "no {wanted:?} in {error}");
    };
    check("order of layers", |tables| tables.swap(0, 1));
    check("order of layers", |tables| tables[1].kind = TableKind::Predictor);
    check("the model has 2 layers", |tables| tables[3].layer = LayerId(2));
    check("layer 0 base: 0 bytes", |tables| tables[1].len = 0);
    check("layer 0 base: 18", |tables| tables[1].len = u64::MAX);
    check("offset is", |tables| tables[2].offset += 64);
    check("first block", |tables| tables[2].first_block.0 += 1);
}

#[test]
fn matrices_of_several_tiles_come_back_whole() {
    let folder = folder();
    let path = folder.path().join("wide.lsb");
    let model = ModelConfig { hidden: 1040, vocab_size: 150, ..sample::tiny_model() };
    let parts = sample::parts(model, DType::F16, DType::F16, 2, 8);
    let data = sample::write(&path, parts.clone(), 8).unwrap();
    check(&path, &parts, &data);
    let tiles: Vec<_> = Bundle::open(&path).unwrap().blocks().map(|block| block.name).collect();
    assert_eq!(tiles.last().unwrap().to_string(), "embedding tile 2");
}

/// Everything in the bundle equals the parts and the data.
fn check(path: &std::path::Path, parts: &BundleParts, data: &[u8]) {
    let bundle = Bundle::open(path).unwrap();
    assert_eq!(bundle.identity(), &parts.identity);
    assert_eq!(bundle.model(), &parts.model);
    assert_eq!(bundle.vectors(), &parts.vectors);
    assert_eq!(bundle.tokenizer(), parts.tokenizer);
    assert_eq!(bundle.vocabulary(), &parts.vocabulary);
    assert_eq!(bundle.chat_template(), parts.chat_template.as_deref());
    assert_eq!(bundle.placement(), parts.placement.as_ref());

    let bytes = fs::read(path).unwrap();
    assert_eq!(bytes.len() as u64, bundle.total_len());
    let start = bundle.data_extent().offset as usize;
    assert!(bytes[start..].starts_with(data));
    assert!(bytes[start + data.len()..].iter().all(|&byte| byte == 0));
    assert_eq!(bundle.data_extent().end(), bundle.total_len());

    let mut end = bundle.data_extent().offset;
    for (index, block) in bundle.blocks().enumerate() {
        assert_eq!(block.id.index(), index);
        assert_eq!(block.extent.offset, end);
        assert!(block.extent.offset.is_multiple_of(64));
        assert_eq!(bundle.block(block.id), Some(block));
        end = block.extent.end();
        let block_bytes = &bytes[block.extent.offset as usize..end as usize];
        bundle.verify_block(block.id, block_bytes).unwrap();
        let checksum = xxhash_rust::xxh3::xxh3_64(block_bytes);
        assert_eq!(bundle.block_checksum(block.id), Some(checksum));
    }
    assert_eq!(bundle.blocks().count(), bundle.block_count() as usize);

    let mut last = (0, 0);
    bundle.verify(&mut |done, total| last = (done, total)).unwrap();
    assert_eq!(last, (bundle.data_extent().len, bundle.data_extent().len));
}

#[test]
fn blocks_have_names() {
    let folder = folder();
    let path = folder.path().join("tiny.lsb");
    sample::write(&path, sample::tiny_parts(), 1).unwrap();
    let names: Vec<_> =
        Bundle::open(&path).unwrap().blocks().map(|block| block.name.to_string()).collect();
    assert_eq!(names[..2], ["layer 0 q_proj tile 0", "layer 0 k_proj tile 0"]);
    assert_eq!(names[8..10], ["layer 1 q_proj tile 0", "layer 1 k_proj tile 0"]);
    assert_eq!(names[15], "layer 1 ffn block 3");
    assert_eq!(names[16..], ["head tile 0", "embedding tile 0"]);
}

#[test]
fn padding_is_counted_to_the_byte() {
    let folder = folder();
    let path = folder.path().join("tiny.lsb");
    sample::write(&path, sample::tiny_parts(), 1).unwrap();
    let bundle = Bundle::open(&path).unwrap();
    let weights: u64 = bundle.blocks().map(|block| block.weight_bytes).sum();
    let data = bundle.data_extent().len;
    let sections: u64 = bundle.sections().iter().map(|section| section.extent.len).sum();
    let front = 64 + 32 * bundle.sections().len() as u64;
    assert_eq!(bundle.padding_bytes(), bundle.total_len() - front - (sections - data) - weights);
}

#[test]
fn block_checksums_can_be_left_in_the_file() {
    let folder = folder();
    let path = folder.path().join("tiny.lsb");
    sample::write(&path, sample::tiny_parts(), 1).unwrap();
    let kept = Bundle::open(&path).unwrap();
    let dropped = Bundle::open_with(&path, BlockChecksums::Drop).unwrap();
    assert_eq!(dropped.block_checksum(BlockId(0)), None);
    assert_eq!(kept.heap_bytes() - dropped.heap_bytes(), 8 * u64::from(kept.block_count()));
    dropped.verify(&mut |_, _| ()).unwrap();
    let block = dropped.blocks().next().unwrap();
    let mut bytes = fs::read(&path).unwrap();
    let bytes = &mut bytes[block.extent.offset as usize..block.extent.end() as usize];
    dropped.verify_block(block.id, bytes).unwrap();
    bytes[0] ^= 1;
    let error = dropped.verify_block(block.id, bytes).unwrap_err();
    assert!(error.to_string().contains("layer 0 q_proj tile 0"), "{error}");
}

#[test]
fn the_tokenizer_can_be_taken_out() {
    let folder = folder();
    let path = folder.path().join("tiny.lsb");
    sample::write(&path, sample::tiny_parts(), 1).unwrap();
    let mut bundle = Bundle::open(&path).unwrap();
    let before = bundle.heap_bytes();
    let text = bundle.take_tokenizer();
    assert_eq!(text, sample::tiny_parts().tokenizer);
    assert_eq!(bundle.tokenizer(), "");
    assert_eq!(before - bundle.heap_bytes(), text.len() as u64);
}

#[test]
fn ids_behind_the_vocabulary_are_unused() {
    let vocabulary = sample::tiny_parts().vocabulary;
    assert_eq!(vocabulary.len(), 67);
    assert_eq!(vocabulary.piece(TokenId(4)), [0xF4]);
    assert_eq!(vocabulary.kind(TokenId(4)), TokenKind::Byte);
    assert_eq!(vocabulary.piece(TokenId(66)), b" w66");
    assert_eq!(
        (vocabulary.piece(TokenId(67)), vocabulary.kind(TokenId(67))),
        (&[][..], TokenKind::Unused)
    );
}

#[test]
fn equal_parts_give_equal_bytes() {
    let folder = folder();
    let [first, second] = ["first", "second"].map(|name| folder.path().join(name));
    sample::write(&first, sample::tiny_parts(), 1).unwrap();
    sample::write(&second, sample::tiny_parts(), 1).unwrap();
    assert_eq!(fs::read(first).unwrap(), fs::read(second).unwrap());
}

/// Llama-family shapes as published: padding stays small, tiles near their length, blocks page-sized.
#[test]
fn real_models_have_little_padding() {
    let shapes = [
        // hidden, ffn, layers, heads, kv_heads, head_dim, vocab, tied, neurons a block
        (576, 1536, 30, 9, 3, 64, 49152, true, 16),
        (2048, 8192, 16, 32, 8, 64, 128_256, true, 4),
        (3584, 18944, 28, 28, 4, 128, 152_064, false, 3),
        (4096, 11008, 32, 32, 32, 128, 32000, false, 2),
    ];
    for (hidden, ffn_hidden, layers, heads, kv_heads, head_dim, vocab_size, tied_head, neurons) in
        shapes
    {
        let model = ModelConfig {
            hidden,
            ffn_hidden,
            layers,
            heads,
            kv_heads,
            head_dim,
            vocab_size,
            tied_head,
            qkv_bias: false,
            qk_norm: false,
            ..sample::tiny_model()
        };
        for dtype in [DType::F16, DType::Q8_0, DType::Q4_0] {
            let map = plan_weights(&model, WeightTypes::all(dtype), neurons).unwrap();
            let (weights, bytes) = map.blocks().fold((0, 0), |(weights, bytes), block| {
                (weights + block.weight_bytes, bytes + block.extent.len)
            });
            let padding = (bytes - weights) as f64 / bytes as f64;
            assert!(padding <= 0.04, "hidden {hidden} {dtype:?}: {padding}");
        }
        let tile_rows = plan_weights(&model, WeightTypes::all(DType::F16), neurons)
            .unwrap()
            .embedding
            .tile_rows;
        assert!(tile_rows.is_multiple_of(64));
        assert!(tile_rows == 64 || u64::from(tile_rows) * u64::from(hidden) * 2 <= 128 << 10);
    }
}

prop_compose! {
    fn any_model()(
        groups in 1..4u32,
        ffn_hidden in 1..70u32,
        layers in 1..4u16,
        kv_heads in 1..3u32,
        queries in 1..3u32,
        half_dim in prop::sample::select(vec![16, 32]),
        vocab_size in 9..300u32,
        flags in any::<[bool; 4]>(),
        factor in 1f32..9.0,
    ) -> ModelConfig {
        ModelConfig {
            architecture: if flags[0] { Architecture::Qwen2 } else { Architecture::Llama },
            hidden: 32 * groups,
            ffn_hidden,
            layers,
            heads: kv_heads * queries,
            kv_heads,
            head_dim: 2 * half_dim,
            vocab_size,
            rope: ls_bundle::model::RopeConfig {
                theta: 500.0,
                scaling: RopeScaling::Linear { factor },
            },
            sliding_window: None,
            tied_head: flags[1],
            qkv_bias: flags[2],
            qk_norm: flags[3],
            ..sample::tiny_model()
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn any_bundle_comes_back_whole(
        model in any_model(),
        dense in prop::sample::select(vec![DType::F16, DType::Q8_0, DType::Q4_0]),
        ffn in prop::sample::select(vec![DType::F16, DType::Q8_0, DType::Q4_0]),
        block_neurons in 1..9u32,
        seed in any::<u64>(),
    ) {
        let folder = folder();
        let path = folder.path().join("any.lsb");
        let parts = sample::parts(model, dense, ffn, block_neurons, seed);
        let data = sample::write(&path, parts.clone(), seed).unwrap();
        check(&path, &parts, &data);
    }
}

#[test]
fn placement_is_read_layer_by_layer() {
    let placement = sample::tiny_parts().placement.unwrap();
    let order: Vec<_> = placement.layer(LayerId(1)).iter().map(|neuron| neuron.0).collect();
    assert_eq!(order, [1, 2, 3, 4, 5, 6, 0]);
}

#[test]
fn a_writer_dropped_before_the_end_leaves_nothing() {
    let folder = folder();
    let path = folder.path().join("tiny.lsb");
    let mut writer = BundleWriter::create(&path, sample::tiny_parts()).unwrap();
    let block = writer.next_block().unwrap();
    writer.write_block(&vec![1; block.weight_bytes as usize]).unwrap();
    let name = format!("tiny.lsb.{}.tmp", std::process::id());
    assert!(folder.path().join(name).exists());
    drop(writer);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn a_failed_writer_leaves_the_old_bundle_alone() {
    let folder = folder();
    let path = folder.path().join("tiny.lsb");
    sample::write(&path, sample::tiny_parts(), 1).unwrap();
    let before = fs::read(&path).unwrap();
    let mut writer = BundleWriter::create(&path, sample::tiny_parts()).unwrap();
    let error = writer.write_block(&[1]).unwrap_err();
    assert_eq!(error.class(), ErrorClass::Invalid);
    assert!(
        error.to_string().contains("layer 0 q_proj tile 0: 1 bytes, 160 are wanted"),
        "{error}"
    );
    let error = writer.finish().unwrap_err();
    assert!(error.to_string().contains("layer 0 q_proj tile 0: it was not written"), "{error}");
    assert_eq!(fs::read(&path).unwrap(), before);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn two_writers_of_one_file_do_not_mix() {
    let folder = folder();
    let path = folder.path().join("tiny.lsb");
    let writer = BundleWriter::create(&path, sample::tiny_parts()).unwrap();
    let error = BundleWriter::create(&path, sample::tiny_parts()).unwrap_err();
    assert_eq!(error.class(), ErrorClass::Io);
    drop(writer);
    // What a killed process left behind is written over.
    let left_over = folder.path().join(format!("tiny.lsb.{}.tmp", std::process::id()));
    fs::write(&left_over, vec![7; 100_000]).unwrap();
    sample::write(&path, sample::tiny_parts(), 1).unwrap();
    Bundle::open(&path).unwrap().verify(&mut |_, _| ()).unwrap();
    assert!(!left_over.exists());
}

#[test]
fn a_block_too_many_is_refused() {
    let folder = folder();
    let mut writer =
        BundleWriter::create(&folder.path().join("tiny.lsb"), sample::tiny_parts()).unwrap();
    while let Some(block) = writer.next_block() {
        writer.write_block(&vec![1; block.weight_bytes as usize]).unwrap();
    }
    assert_eq!(writer.write_block(&[1]).unwrap_err().class(), ErrorClass::Invalid);
    writer.finish().unwrap();
}

#[test]
fn invalid_parts_are_refused_before_anything_is_written() {
    let folder = folder();
    type Spoil = fn(&mut BundleParts);
    let cases: [(&str, Spoil); 15] = [
        ("kv_heads is 3", |parts| parts.model.kv_heads = 3),
        ("source_hash", |parts| parts.identity.source_hash.truncate(63)),
        ("attn_norm: value 3 is NaN", |parts| parts.vectors.layers[1].attn_norm[3] = f32::NAN),
        ("layer 0 k_bias: 5 values", |parts| parts.vectors.layers[0].k_bias.push(0.0)),
        ("the text is empty", |parts| parts.tokenizer.clear()),
        ("special token 69", |parts| parts.model.special.stop.push(69)),
        ("67 tokens, the model has", |parts| parts.model.vocab_size = 66),
        ("q_proj: offset is 64", |parts| parts.weights.layers[0].q_proj.offset = 64),
        ("recipe has 32769 bytes", |parts| parts.identity.recipe = "r".repeat(32769)),
        ("source has 257 bytes", |parts| parts.identity.source = "s".repeat(257)),
        ("add_bos is set, but there is no bos", |parts| parts.model.special.bos = None),
        ("65 stop tokens", |parts| parts.model.special.stop = vec![2; 65]),
        ("7 entries, 14 are wanted", |parts| {
            parts.placement = Some(Placement::new(7, (0..7).map(NeuronId).collect()));
        }),
        ("chat template: the text is empty", |parts| parts.chat_template = Some(String::new())),
        ("control characters", |parts| parts.model.name.push('\u{1b}')),
    ];
    for (wanted, spoil) in cases {
        let mut parts = sample::tiny_parts();
        spoil(&mut parts);
        let error = BundleWriter::create(&folder.path().join("tiny.lsb"), parts).unwrap_err();
        assert_eq!(error.class(), ErrorClass::Invalid, "{error}");
        assert!(error.to_string().contains(wanted), "{error}");
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn what_passes_a_limit_is_no_plan_and_no_vocabulary() {
    let plan = |model: &ModelConfig, dtype, neurons| {
        plan_weights(model, WeightTypes::all(dtype), neurons).unwrap_err().to_string()
    };
    let tiny = sample::tiny_model();
    let wide = ModelConfig { hidden: 65536, ffn_hidden: 22, ..tiny.clone() };
    let error = plan(&wide, DType::F16, 22);
    assert!(error.contains("layer 0 ffn: tiles or blocks of 8650752 bytes"), "{error}");
    let long = ModelConfig { ffn_hidden: 1 << 20, layers: 2, ..tiny.clone() };
    let error = plan(&long, DType::F16, 1);
    assert!(error.contains("layer 1 ffn: more than 2097152 tiles and blocks"), "{error}");
    let error = plan(&tiny, DType::Q8_0, 2);
    assert!(error.contains("layer 0 q_proj: rows of 10 weights cannot be Q8_0"), "{error}");
    let error = plan(&tiny, DType::F16, 0);
    assert!(error.contains("block_neurons: 0"), "{error}");

    let error = Vocabulary::new([(vec![b'x'; 4097], TokenKind::Normal)]).unwrap_err();
    assert!(error.to_string().contains("token 0 reaches from 0 to 4097"), "{error}");
    let error = Vocabulary::new([(b"", TokenKind::Normal); 0]).unwrap_err();
    assert!(error.to_string().contains("0 tokens, 1 to"), "{error}");
}
