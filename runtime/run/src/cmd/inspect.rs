//! `ls-run inspect`.

use crate::args::FileArgs;
use crate::cmd::{print_json, print_line};
use ls_bundle::Bundle;
use ls_bundle::ids::ByteCount;

/// Runs the command.
pub(crate) fn run(args: &FileArgs) -> anyhow::Result<()> {
    let bundle = Bundle::open(&args.bundle)?;
    let (config, map, identity) = (bundle.model(), bundle.weights(), bundle.identity());
    let first = &map.layers[0];
    let padding_share = bundle.padding_bytes() as f64 / bundle.total_len() as f64;
    if args.json {
        let sections: Vec<_> = bundle
            .sections()
            .iter()
            .map(|s| serde_json::json!({ "kind": s.kind.name(), "offset": s.extent.offset, "bytes": s.extent.len }))
            .collect();
        return print_json(&serde_json::json!({
            "bytes": bundle.total_len(),
            "model": config,
            "dense_dtype": first.q_proj.dtype,
            "ffn_dtype": first.ffn.dtype,
            "block_neurons": first.ffn.block_neurons,
            "block_bytes": first.ffn.block_stride(),
            "blocks": bundle.block_count(),
            "padding_bytes": bundle.padding_bytes(),
            "padding_share": padding_share,
            "identity": identity,
            "sections": sections,
        }));
    }
    print_text(args, &bundle, padding_share)
}

fn print_text(args: &FileArgs, bundle: &Bundle, padding_share: f64) -> anyhow::Result<()> {
    let (config, map, identity) = (bundle.model(), bundle.weights(), bundle.identity());
    let first = &map.layers[0];
    print_line(&format!(
        "{}: {:?} model \"{}\"",
        args.bundle.display(),
        config.architecture,
        config.name
    ))?;
    print_line(&format!(
        "  {} layers, hidden {}, ffn {}, {} query and {} key heads of {}, vocabulary {}, context {}{}",
        config.layers,
        config.hidden,
        config.ffn_hidden,
        config.heads,
        config.kv_heads,
        config.head_dim,
        config.vocab_size,
        config.context_length,
        if config.tied_head { ", tied head" } else { "" },
    ))?;
    print_line(&format!(
        "  dense {:?}, FFN {:?}; {} neuron(s) a block of {} bytes; {} tiles and blocks with a checksum each",
        first.q_proj.dtype,
        first.ffn.dtype,
        first.ffn.block_neurons,
        first.ffn.block_stride(),
        bundle.block_count(),
    ))?;
    print_line(&format!(
        "  {} bytes ({}), {} of them padding ({:.2} %)",
        bundle.total_len(),
        ByteCount(bundle.total_len()),
        bundle.padding_bytes(),
        100.0 * padding_share
    ))?;
    print_line(&format!(
        "  made by {} from {} (blake3 {}), seed {}",
        identity.tool, identity.source, identity.source_hash, identity.seed
    ))?;
    print_line("  section              offset          bytes")?;
    for section in bundle.sections() {
        print_line(&format!(
            "  {:<16} {:>10} {:>14}",
            section.kind.name(),
            section.extent.offset,
            section.extent.len
        ))?;
    }
    Ok(())
}
