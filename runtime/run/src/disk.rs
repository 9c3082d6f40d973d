//! How this disk likes to be asked: request size and reads in flight at its knee, measured once a device and kept in
//! the user's cache folder (`$XDG_CACHE_HOME/leanstream/disks.json`, else below `~/.cache`).

use ls_bundle::files;
use ls_io::IoError;
use serde_json::{Map, Value, json};
use std::ops::RangeInclusive;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// What is tried. Smaller requests only cost processor time, larger buffers only memory.
const REQUEST_BYTES: [u64; 4] = [256 << 10, 512 << 10, 1 << 20, 2 << 20];
const DEPTHS: [u32; 3] = [4, 8, 16];
/// Buffers of the measurement. With smaller ones a disk may be as fast while nobody computes, but what arrives has to wait
/// somewhere while something is computed.
const IN_FLIGHT_BYTES: RangeInclusive<u64> = 4 << 20..=16 << 20;
/// Each shape is tried this often, in turns, and its best try counts: others can only slow a disk down.
const ROUNDS: u32 = 3;
/// Reads of blocks, small and large ones, and how many of them are in flight.
const BLOCK_BYTES: [u64; 2] = [4 << 10, 64 << 10];
const MANY: u32 = 32;
/// More bytes than this are never read for nothing, however dear small reads seemed at that moment.
const MAX_READ_COST_BYTES: u64 = 32 << 10;
/// Most reads in flight.
pub(crate) const MAX_DEPTH: u32 = 32;
/// This part of a budget hardly counts.
const LITTLE: u64 = 64;
/// Larger requests bring no disk more.
const LARGE_BYTES: u64 = 1 << 20;
const PAGE: u64 = 4096;
/// Time of one try.
const TRY_MS: u64 = 30;
/// The smallest buffers with this share of the best throughput are enough.
const ENOUGH: f64 = 0.95;

/// A shape of streaming reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Bytes of a read.
    pub(crate) request_bytes: u64,
    /// Reads in flight.
    pub(crate) depth: u32,
    /// What a read costs beside its bytes, as bytes of these.
    pub(crate) read_cost_bytes: u64,
}

impl Shape {
    /// The same with as many buffers as hardly count in `budget_bytes`, and larger ones: the disk goes on while resident
    /// weights are computed with, which takes longer the more of them there are.
    pub(crate) fn deepened(self, budget_bytes: u64) -> Shape {
        let little = budget_bytes / LITTLE;
        let larger = (little / 16).min(LARGE_BYTES) / PAGE * PAGE;
        let request_bytes = self.request_bytes.max(larger);
        let most = (little / request_bytes).min(u64::from(MAX_DEPTH));
        Shape { request_bytes, depth: self.depth.max(most as u32), ..self }
    }

    fn in_flight_bytes(self) -> u64 {
        self.request_bytes * u64::from(self.depth)
    }
}

/// What most disks are content with; used until something was measured.
pub(crate) const DEFAULT: Shape =
    Shape { request_bytes: 1 << 20, depth: 8, read_cost_bytes: 8 << 10 };

/// The shape for the disk that holds `path`: known from before, or measured now if `room_bytes` allow it.
pub(crate) fn shape(path: &Path, room_bytes: u64) -> Shape {
    let (Some(file), Some(device)) = (cache_file(), device(path)) else { return DEFAULT };
    let mut known = read(&file);
    if let Some(shape) = known.get(&device).and_then(from_json) {
        return shape;
    }
    if room_bytes < *IN_FLIGHT_BYTES.end() {
        return DEFAULT;
    }
    let Ok(shape) = measure(path) else { return DEFAULT };
    known.insert(device, to_json(shape));
    write(&file, known);
    shape
}

fn measure(path: &Path) -> Result<Shape, IoError> {
    let shape = |request_bytes, depth| Shape { request_bytes, depth, ..DEFAULT };
    let shapes = REQUEST_BYTES
        .iter()
        .flat_map(|&request_bytes| DEPTHS.iter().map(move |&depth| shape(request_bytes, depth)));
    let mut tried: Vec<(Shape, f64)> = shapes
        .filter(|s| IN_FLIGHT_BYTES.contains(&s.in_flight_bytes()))
        .map(|s| (s, 0.0))
        .collect();
    let mut by_size = [0.0f64; 2];
    for _ in 0..ROUNDS {
        for (best, bytes) in by_size.iter_mut().zip(BLOCK_BYTES) {
            *best = best.max(ls_io::probe::bandwidth(path, bytes as usize, MANY, TRY_MS)?);
        }
        for (shape, best) in &mut tried {
            let request_bytes = shape.request_bytes as usize;
            *best = best.max(ls_io::probe::bandwidth(path, request_bytes, shape.depth, TRY_MS)?);
        }
    }
    Ok(Shape { read_cost_bytes: read_cost(by_size), ..knee(&tried) })
}

/// What a read costs beside its bytes, as bytes: half of it, since what is read for nothing is sure and what is saved is
/// not. From the bytes a second of many reads of each of [`BLOCK_BYTES`].
fn read_cost(bytes_s: [f64; 2]) -> u64 {
    let bytes = BLOCK_BYTES.map(|bytes| bytes as f64);
    let [small_s, large_s] = [bytes[0] / bytes_s[0].max(1.0), bytes[1] / bytes_s[1].max(1.0)];
    let byte_s = (large_s - small_s) / (bytes[1] - bytes[0]);
    if byte_s <= 0.0 {
        return MAX_READ_COST_BYTES;
    }
    let read_s = (small_s - bytes[0] * byte_s).max(0.0);
    ((read_s / byte_s / 2.0) as u64).min(MAX_READ_COST_BYTES)
}

/// Of (shape, bytes a second), the one with the smallest buffers that is nearly as fast as the fastest.
fn knee(tried: &[(Shape, f64)]) -> Shape {
    let best = tried.iter().map(|&(_, rate)| rate).fold(0.0, f64::max);
    let enough = tried.iter().filter(|&&(_, rate)| rate >= ENOUGH * best);
    enough.map(|&(shape, _)| shape).min_by_key(|s| s.in_flight_bytes()).unwrap_or(DEFAULT)
}

fn cache_file() -> Option<PathBuf> {
    Some(files::cache_folder()?.join("disks.json"))
}

/// The device's number: the same until it is replaced or the machine's disks are numbered anew.
fn device(path: &Path) -> Option<String> {
    Some(std::fs::metadata(path).ok()?.dev().to_string())
}

fn to_json(shape: Shape) -> Value {
    json!({
        "request_bytes": shape.request_bytes,
        "depth": shape.depth,
        "read_cost_bytes": shape.read_cost_bytes,
    })
}

/// None for anything that was not written by this program.
fn from_json(value: &Value) -> Option<Shape> {
    let request_bytes = value["request_bytes"].as_u64().filter(|r| REQUEST_BYTES.contains(r))?;
    let depth = u32::try_from(value["depth"].as_u64()?).ok().filter(|d| DEPTHS.contains(d))?;
    let read_cost_bytes =
        value["read_cost_bytes"].as_u64().filter(|&c| c <= MAX_READ_COST_BYTES)?;
    Some(Shape { request_bytes, depth, read_cost_bytes })
}

fn read(file: &Path) -> Map<String, Value> {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    match serde_json::from_str(&text) {
        Ok(Value::Object(known)) => known,
        _ => Map::new(),
    }
}

/// A cache that cannot be written is no failure: the next start measures again.
fn write(file: &Path, known: Map<String, Value>) {
    files::cache(file, Value::Object(known).to_string().as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_knee_is_the_smallest_that_is_nearly_the_best() {
        let shape = |request_bytes, depth| Shape { request_bytes, depth, ..DEFAULT };
        let tried = [
            (shape(256 << 10, 4), 500.0),
            (shape(512 << 10, 8), 960.0),
            (shape(1 << 20, 8), 1000.0),
            (shape(2 << 20, 4), 940.0),
        ];
        assert_eq!(knee(&tried), shape(512 << 10, 8));
        assert_eq!(knee(&[]), DEFAULT);
    }

    #[test]
    fn small_reads_cost_what_large_ones_bring_meanwhile() {
        // 20 us a read and 1 ns a byte.
        let bytes_s = BLOCK_BYTES.map(|bytes| bytes as f64 / (20e-6 + bytes as f64 * 1e-9));
        assert!(read_cost(bytes_s).abs_diff(10_000) < 2);
        assert_eq!(read_cost([1e9, 1e9]), 0);
        assert_eq!(read_cost([1e8, 1.6e9]), MAX_READ_COST_BYTES, "all reads take the same time");
        assert_eq!(read_cost([2e9, 1e9]), 0);
    }

    #[test]
    fn buffers_grow_with_the_budget_but_not_beyond_what_hardly_counts() {
        let at = |shape: Shape, mib: u64| {
            let Shape { request_bytes, depth, .. } = shape.deepened(mib << 20);
            (request_bytes >> 10, depth)
        };
        assert_eq!([96, 640, 1600, 4096].map(|mib| at(DEFAULT, mib).1), [8, 10, 25, 32]);
        let small = Shape { request_bytes: 256 << 10, depth: 4, ..DEFAULT };
        let wanted = [(256, 6), (256, 10), (1024, 19), (1024, 32)];
        assert_eq!([96, 160, 1228, 4096].map(|mib| at(small, mib)), wanted);
    }

    #[test]
    fn a_shape_survives_the_cache_and_nonsense_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("deep/disks.json");
        let shape = Shape { request_bytes: 1 << 20, depth: 4, read_cost_bytes: 18_000 };
        write(&file, Map::from_iter([("7".to_owned(), to_json(shape))]));
        assert_eq!(read(&file).get("7").and_then(from_json), Some(shape));
        for nonsense in [
            "{\"7\": {\"request_bytes\": 1048576, \"depth\": 4}}",
            "{\"7\": {\"request_bytes\": 1048576, \"depth\": 4, \"read_cost_bytes\": 65536}}",
            "",
            "[]",
            "{\"7\": 3}",
            "{\"7\": {\"request_bytes\": 1, \"depth\": 4}}",
            "{\"7\": {}}",
        ] {
            std::fs::write(&file, nonsense).unwrap();
            assert_eq!(read(&file).get("7").and_then(from_json), None, "{nonsense}");
        }
        let left: Vec<_> = std::fs::read_dir(file.parent().unwrap()).unwrap().collect();
        assert_eq!(left.len(), 1, "{left:?}");
    }
}
