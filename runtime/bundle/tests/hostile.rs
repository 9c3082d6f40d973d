//! Damage on purpose: files whose checksums are right and whose contents lie. Each is an error that names the place,
//! and none makes the reader allocate on its word.

#[path = "../../../tools/fuzz/src/allocations.rs"]
mod allocations;
mod forge;
mod sample;

use allocations::{Counting, peak_bytes};
use forge::Forge;
use ls_bundle::ids::{BlockId, LayerId};
use ls_bundle::model::{DType, ModelConfig, RopeScaling, WeightMap};
use ls_bundle::tables::{Settings, TableKind, TableMap};
use ls_bundle::{Bundle, BundleError, ErrorClass, SectionKind};
use std::fs;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn open(bytes: &[u8]) -> Result<Bundle, BundleError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("hostile.lsb");
    fs::write(&path, bytes).unwrap();
    let (result, peak) = peak_bytes(|| Bundle::open(&path));
    assert!(peak < 2 << 20, "{peak} bytes for {result:?}");
    result
}

fn tiny() -> Forge {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.lsb");
    sample::write(&path, sample::learned_parts(), 1).unwrap();
    Forge::new(fs::read(&path).unwrap())
}

/// Opening what `lie` makes of a valid bundle is an error of this class that contains `wanted`.
fn check(class: ErrorClass, wanted: &str, lie: impl FnOnce(&mut Forge)) {
    let mut forge = tiny();
    lie(&mut forge);
    let error = open(&forge.seal()).expect_err(wanted);
    assert_eq!(error.class(), class, "{error}");
    assert!(error.to_string().contains(wanted), "wanted {wanted}, found {error}");
}

/// The same for contents of sections, whose checksums are made right.
fn check_content(wanted: &str, lie: impl FnOnce(&mut Forge)) {
    check(ErrorClass::Corrupt, wanted, |forge| {
        lie(forge);
        forge.reseal_sections();
    });
}

fn check_model(wanted: &str, lie: impl FnOnce(&mut ModelConfig)) {
    check_content(wanted, |forge| forge.recode(SectionKind::Model, lie));
}

fn check_weights(wanted: &str, lie: impl FnOnce(&mut WeightMap)) {
    check_content(wanted, |forge| forge.recode(SectionKind::Weights, lie));
}

use ErrorClass::{Corrupt, Incomplete, Unsupported};
use SectionKind as Kind;

#[test]
fn the_forge_itself_changes_nothing() {
    let forge = tiny();
    let before = forge.bytes.clone();
    assert!(forge.seal() == before);
    let mut forge = tiny();
    forge.recode(Kind::Model, |_: &mut ModelConfig| ());
    forge.recode(Kind::Weights, |_: &mut WeightMap| ());
    forge.reseal_sections();
    assert!(forge.seal() == before);
}

#[test]
fn headers_that_lie() {
    check(Unsupported, "format version 4", |f| f.header.version = 4);
    check(Unsupported, "format version 0", |f| f.header.version = 0);
    check(Corrupt, "unused bytes at 40", |f| f.header.unused[15] = 1);
    check(Corrupt, "section table offset is 4096", |f| f.header.table_offset = 4096);
    check(Corrupt, "4294967295 sections", |f| f.header.sections = u32::MAX);
    check(Corrupt, "section table: its checksum", |f| f.header.sections = 0);
    check(Corrupt, "section table: its checksum", |f| f.header.sections = 16);
    check(Incomplete, "18446744073709547520 are wanted", |f| {
        f.header.total_len = u64::MAX - 4095;
    });
    check(Corrupt, "not a multiple of 4096", |f| f.header.total_len = u64::MAX);
    check(Corrupt, "bytes behind the end of the bundle", |f| f.header.total_len = 0);
}

#[test]
fn section_tables_that_lie() {
    check(Corrupt, "section identity is missing", |f| {
        f.header.sections = 0;
        f.table.clear();
    });
    check(Unsupported, "entry 3: section of unknown kind 11", |f| f.table[3].kind = 11);
    check(Corrupt, "section tables in a bundle of version 1", |f| f.header.version = 1);
    check(Corrupt, "unused bytes of entry 3", |f| f.table[3].unused = 1);
    check(Corrupt, "section model stands behind section weights", |f| f.table.swap(1, 2));
    check(Corrupt, "section model stands behind section model", |f| {
        f.table[2] = f.table[1].clone();
    });
    check(Corrupt, "section tokenizer is missing", |f| {
        f.table.remove(4);
        f.header.sections -= 1;
    });
    for (kind, len) in [
        (Kind::Identity, 1 << 17),
        (Kind::Tokenizer, u64::MAX),
        (Kind::Tokenizer, 0),
        (Kind::Vectors, 1 << 40),
        (Kind::BlockChecksums, 1 << 25),
    ] {
        let wanted = format!("section {} has {len} bytes", kind.name());
        check(Corrupt, &wanted, |f| f.entry(kind).len = len);
    }
    check(Corrupt, "sections but data have", |f| {
        for kind in [Kind::Tokenizer, Kind::Vectors, Kind::Vocabulary] {
            f.entry(kind).len = ls_bundle::limits::max_section_bytes(kind);
        }
    });
    check(Corrupt, "no multiple of 4096", |f| f.entry(Kind::Data).len += 64);
    check(Corrupt, "the last section ends at", |f| f.entry(Kind::Data).len += 4096);
    check(Corrupt, "the last section ends at 12288, the file at 16384", |f| {
        f.header.total_len += 4096;
        f.bytes.resize(16384, 0);
    });
    check(Corrupt, "too long", |f| f.entry(Kind::Data).len = u64::MAX - 4095);
    // Overlapping, apart, and far outside.
    for offset in [64, 0, 1 << 20, u64::MAX] {
        let wanted = format!("bytes at {offset}) should be at");
        check(Corrupt, &wanted, |f| f.entry(Kind::Tokenizer).offset = offset);
    }
    check(Corrupt, "should be at", |f| f.entry(Kind::Model).offset -= 64);
    check(Corrupt, "should be at", |f| f.entry(Kind::Data).offset += 4096);
    check(Corrupt, "section data", |f| f.entry(Kind::Data).checksum ^= 1);
}

#[test]
fn lengths_that_lie_inside_sections() {
    for huge in [u64::MAX, 1 << 62, 1 << 40, 60_000] {
        let huge = huge.to_le_bytes();
        // The first string of each: its length stands at the start, or behind the architecture.
        check_content("section identity", |f| f.put(Kind::Identity, 0, &huge));
        check_content("section model", |f| f.put(Kind::Model, 4, &huge));
        check_content("section weights", |f| f.put(Kind::Weights, 0, &huge));
    }
    check_content("1 bytes behind its end", |f| {
        f.recode(Kind::Model, |model: &mut ModelConfig| model.name = "tin".into());
    });
    check_content("4294967295 tokens", |f| f.put(Kind::Vocabulary, 0, &[0xFF; 4]));
    check_content("0 tokens", |f| f.put(Kind::Vocabulary, 0, &[0; 4]));
    check_content("100000 tokens do not fit", |f| {
        f.put(Kind::Vocabulary, 0, &100_000u32.to_le_bytes());
    });
    let ends = 4 + 67;
    check_content("token 0 reaches from 0 to 4096 of", |f| {
        f.put(Kind::Vocabulary, ends, &4096u32.to_le_bytes());
    });
    check_content("token 1 reaches from 3 to 2 of", |f| {
        f.put(Kind::Vocabulary, ends + 4, &2u32.to_le_bytes());
    });
    check_content("1 bytes belong to no token", |f| {
        let at = ends + 4 * 66;
        let end = f.section(Kind::Vocabulary)[at] - 1;
        f.put(Kind::Vocabulary, at, &[end]);
    });
    check_content("token 0 is of unknown kind 4", |f| f.put(Kind::Vocabulary, 4, &[4]));
    check_content("byte token 0 has not one byte", |f| f.put(Kind::Vocabulary, 4, &[2]));
}

#[test]
fn models_that_lie() {
    check_model("hidden is 0", |m| m.hidden = 0);
    check_model("hidden is 65537", |m| m.hidden = 65537);
    check_model("vocab_size is 4294967295", |m| m.vocab_size = u32::MAX);
    check_model("ffn_hidden is 4294967295", |m| m.ffn_hidden = u32::MAX);
    check_model("layers is 65535", |m| m.layers = u16::MAX);
    check_model("layers is 0", |m| m.layers = 0);
    check_model("heads is 4294967295", |m| m.heads = u32::MAX);
    check_model("kv_heads is 0", |m| m.kv_heads = 0);
    check_model("kv_heads is 3, which does not divide heads, 4", |m| m.kv_heads = 3);
    check_model("kv_heads is 8, which does not divide heads, 4", |m| m.kv_heads = 8);
    check_model("head_dim is 3, which is odd", |m| m.head_dim = 3);
    check_model("context_length is 0", |m| m.context_length = 0);
    check_model("sliding_window is 0", |m| m.sliding_window = Some(0));
    check_model("norm_epsilon is NaN", |m| m.norm_epsilon = f32::NAN);
    check_model("rope theta is -1", |m| m.rope.theta = -1.0);
    let scaling = |factor, low_freq_factor, high_freq_factor, original_context| {
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context }
    };
    check_model("rope factor is inf", |m| m.rope.scaling = scaling(f32::INFINITY, 1.0, 4.0, 8));
    check_model("low_freq_factor is not below", |m| m.rope.scaling = scaling(8.0, 4.0, 4.0, 8));
    check_model("original_context is 0", |m| m.rope.scaling = scaling(8.0, 1.0, 4.0, 0));
    check_model("special token 67", |m| m.special.stop[1] = 67);
    check_model("special token 4294967295", |m| m.special.bos = Some(u32::MAX));
    check_model("control characters", |m| m.name = "ti\ny".into());
    check_model("a head of its own: true, tied_head: true", |m| m.tied_head = true);
    check_model("bytes, ", |m| m.qkv_bias = false);
    check_model("bytes, ", |m| m.qk_norm = false);
    check_model("2 layers, the model has 1024", |m| m.layers = 1024);
    check_model("q_proj: shape is 8 x 10, the model says 8 x 12", |m| m.hidden = 12);
    check_model("k_proj: shape is 4 x 10, the model says 8 x 10", |m| m.kv_heads = 4);
    check_model("ffn: shape is 7 x 10, the model says 8 x 10", |m| m.ffn_hidden = 8);
    check_model("head: shape is 70 x 10, the model says 71 x 10", |m| m.vocab_size = 71);
}

#[test]
fn weights_that_lie() {
    check_weights("layer 1 q_proj: offset is", |w| w.layers[1].q_proj.offset += 64);
    check_weights("layer 1 ffn: offset is 18446744073709551615", |w| {
        w.layers[1].ffn.offset = u64::MAX;
    });
    check_weights("layer 0 v_proj: offset is", |w| w.layers[0].v_proj = w.layers[0].k_proj);
    check_weights("layer 0 k_proj: first block is 0, 1 is wanted", |w| {
        w.layers[0].k_proj.first_block = BlockId(0);
    });
    check_weights("embedding: first block is 4294967295", |w| {
        w.embedding.first_block = BlockId(u32::MAX);
    });
    check_weights("layer 0 q_proj: 0 rows", |w| w.layers[0].q_proj.tile_rows = 0);
    check_weights("layer 0 q_proj: 9 rows", |w| w.layers[0].q_proj.tile_rows = 9);
    check_weights("q_proj: tiles of 60 bytes", |w| w.layers[0].q_proj.tile_rows = 3);
    check_weights("ffn: 0 rows or neurons", |w| w.layers[0].ffn.block_neurons = 0);
    check_weights("ffn: 4294967295 rows or neurons", |w| {
        w.layers[0].ffn.block_neurons = u32::MAX;
    });
    check_weights("rows of 10 weights cannot be Q4_0", |w| w.embedding.dtype = DType::Q4_0);
}

#[test]
fn learned_tables_that_lie() {
    let check_tables = |wanted: &str, lie: fn(&mut TableMap)| {
        check_content(wanted, |forge| forge.recode(Kind::Tables, lie));
    };
    check_tables("layer 0 base: offset is", |t| t.tables[1].offset -= 64);
    check_tables("layer 0 base: offset is", |t| t.tables[1].offset = u64::MAX);
    check_tables("layer 0 predictor: 0 bytes", |t| t.tables[0].len = 0);
    check_tables("layer 1 reuse: 18446744073709551615 bytes", |t| t.tables[3].len = u64::MAX);
    check_tables("the last weight ends at", |t| t.tables[3].len = 1 << 30);
    check_tables("the model has 2 layers", |t| t.tables[3].layer = LayerId(u16::MAX));
    check_tables("there twice", |t| t.tables[1].kind = TableKind::Predictor);
    check_tables("a table of kind mlp in a bundle of version 2", |t| {
        t.tables[3].kind = TableKind::Mlp;
    });
    check_tables("first block is 0", |t| t.tables[0].first_block = BlockId(0));
    for huge in [u64::MAX, 1 << 40, 60_000] {
        check_content("section tables", |f| f.put(Kind::Tables, 0, &huge.to_le_bytes()));
    }
    let check_settings = |wanted: &str, lie: fn(&mut Settings)| {
        check_content(wanted, |forge| forge.recode(Kind::Settings, lie));
    };
    check_settings("exact_share is 1.5", |s| s.exact_share = 1.5);
    check_settings("exact_share is NaN", |s| s.exact_share = f32::NAN);
    check_settings("perplexity is -1", |s| s.perplexity = -1.0);
    check_settings("dense_perplexity is inf", |s| s.dense_perplexity = f32::INFINITY);
}

#[test]
fn arrays_that_lie() {
    check_content("layer 0 attn_norm: value 0 is NaN", |f| {
        f.put(Kind::Vectors, 0, &f32::NAN.to_le_bytes());
    });
    check_content("final_norm: value 9 is inf", |f| {
        let end = f.entry(Kind::Vectors).len as usize;
        f.put(Kind::Vectors, end - 4, &f32::INFINITY.to_le_bytes());
    });
    check_content("layer 1: neuron 2 is there twice or beyond 7", |f| {
        f.put(Kind::Placement, 28, &2u32.to_le_bytes());
    });
    check_content("layer 0: neuron 4294967295 is there twice or beyond 7", |f| {
        f.put(Kind::Placement, 0, &[0xFF; 4]);
    });
    check_content("section tokenizer", |f| f.put(Kind::Tokenizer, 3, &[0xFF]));
    check_content("section chat template", |f| f.put(Kind::ChatTemplate, 0, &[0xC0]));
}

/// Padding under a right checksum is still checked: what is not zero could carry anything.
#[test]
fn padding_that_lies() {
    let mut forge = tiny();
    let before = open(&forge.bytes).unwrap();
    let block = before.blocks().find(|block| block.weight_bytes < block.extent.len).unwrap();
    forge.bytes[(block.extent.offset + block.weight_bytes) as usize] = 1;
    let start = block.extent.offset as usize;
    let checksum = xxhash_rust::xxh3::xxh3_64(&forge.bytes[start..][..block.extent.len as usize]);
    forge.put(Kind::BlockChecksums, 8 * block.id.index(), &checksum.to_le_bytes());
    forge.reseal_sections();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("hostile.lsb");
    fs::write(&path, forge.seal()).unwrap();
    let error = Bundle::open(&path).unwrap().verify(&mut |_, _| ()).unwrap_err();
    let wanted = format!("{} ({}", block.name, block.extent.len);
    assert!(error.to_string().contains(&wanted), "{error}");
    assert!(error.to_string().contains("is not zero"), "{error}");
}

/// The largest small sections that a bundle may have still open within the promise.
#[test]
fn the_largest_bundle_opens_in_bounded_memory() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("large.lsb");
    let model = ModelConfig {
        hidden: 65536,
        ffn_hidden: 1,
        layers: 45,
        heads: 1,
        kv_heads: 1,
        vocab_size: 9,
        tied_head: true,
        qkv_bias: false,
        ..sample::tiny_model()
    };
    let mut parts = sample::parts(model, DType::F16, DType::F16, 1, 2);
    parts.tokenizer = " ".repeat(24 << 20);
    sample::write(&path, parts, 2).unwrap();
    let (bundle, peak) = peak_bytes(|| Bundle::open(&path).unwrap());
    let small = bundle.data_extent().offset as isize;
    assert!(small > 46 << 20, "{small}");
    assert!(peak < 64 << 20, "{peak}");
    assert!(bundle.heap_bytes() <= peak);
}
