//! `ls-run verify`.

use crate::args::FileArgs;
use crate::cmd::print_json;
use crate::progress::Progress;
use ls_bundle::Bundle;
use std::time::Instant;

/// Runs the command.
pub(crate) fn run(args: &FileArgs) -> anyhow::Result<()> {
    let started = Instant::now();
    let bundle = Bundle::open(&args.bundle)?;
    let mut progress = Progress::new("verifying", bundle.data_extent().len);
    let mut before = 0;
    bundle.verify(&mut |done, _total| {
        progress.add(done - before);
        before = done;
    })?;
    progress.finish();
    let (bytes, blocks) = (bundle.total_len(), bundle.block_count());
    if args.json {
        return print_json(&serde_json::json!({ "ok": true, "bytes": bytes, "blocks": blocks }));
    }
    let seconds = started.elapsed().as_secs_f64();
    crate::cmd::print_line(&format!(
        "{}: all {bytes} bytes and {blocks} blocks are as written ({:.0} MB/s)",
        args.bundle.display(),
        bytes as f64 / 1e6 / seconds
    ))
}
