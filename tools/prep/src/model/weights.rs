//! [`Weights`]: the numbers of a model on disk, as f32, a strip of rows at a time.
//!
//! Both source formats end here: a tensor is a byte range of a file, a shape and an [`Encoding`]. Nothing is mapped
//! and no matrix is ever held whole, with one exception: a down projection is needed by columns while files keep
//! rows, so its raw bytes (not its f32 values) are in memory while its layer is read.
//!
//! Rows of q and k come out in the half-split rotary order whatever the file has, and every value is finite.

use crate::error::{PrepError, Result};
use crate::model::roles::{Naming, Part, Role};
use candle_core::Device;
use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use ls_bundle::files::File;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Values decoded at a time, about: 4 MiB of f32.
const STRIP_VALUES: u32 = 1 << 20;
/// Every encoding's block divides this.
const UNIT: u32 = 256;

/// Bytes that are read at once to hash a file.
const HASHED_AT_ONCE: usize = 1 << 20;

/// A regular file that weights are read from.
#[derive(Debug)]
pub struct SourceFile {
    /// Where it is.
    pub path: PathBuf,
    /// Its length when it was opened.
    pub len: u64,
    file: File,
}

impl SourceFile {
    /// Opens a regular file for reading.
    pub fn open(path: &Path) -> Result<SourceFile> {
        let io = |source| PrepError::io(path, source);
        let file = File::open(path).map_err(io)?;
        let metadata = file.metadata().map_err(io)?;
        if !metadata.is_file() {
            return Err(PrepError::usage(format!("{} is not a regular file", path.display())));
        }
        Ok(SourceFile { path: path.to_owned(), len: metadata.len(), file })
    }

    /// BLAKE3 of the whole file, as long as it was when it was opened. `progress` hears of bytes.
    pub fn hash(&self, progress: &mut dyn FnMut(u64)) -> Result<blake3::Hash> {
        let mut hasher = blake3::Hasher::new();
        let mut buffer = vec![0; HASHED_AT_ONCE];
        for start in (0..self.len).step_by(HASHED_AT_ONCE) {
            let bytes = &mut buffer[..(self.len - start).min(HASHED_AT_ONCE as u64) as usize];
            self.read_at(start, bytes)?;
            hasher.update(bytes);
            progress(bytes.len() as u64);
        }
        Ok(hasher.finalize())
    }

    /// A handle to read the file from its start; it shares its position with this one, which reads by range only.
    pub fn reader(&self) -> Result<File> {
        self.file.try_clone().map_err(|source| PrepError::io(&self.path, source))
    }

    /// Fills `into` from `offset`; what fails is tried once more, as a disk may recover by itself.
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let mut read = || self.file.read_exact_at(into, offset);
        let done = read().or_else(|e| if is_end(&e) { Err(e) } else { read() });
        done.map_err(|source| {
            if is_end(&source) {
                PrepError::incomplete(self.path.display(), "the file has become shorter")
            } else {
                PrepError::io(&self.path, source)
            }
        })
    }
}

fn is_end(error: &std::io::Error) -> bool {
    error.kind() == ErrorKind::UnexpectedEof
}

/// How a tensor's numbers are stored on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// 32-bit floats.
    F32,
    /// Half precision.
    F16,
    /// The upper half of 32-bit floats.
    Bf16,
    /// One of ggml's block formats.
    Quantised(GgmlDType),
}

impl Encoding {
    /// The encoding that ggml numbers `id`, if it is read here.
    #[must_use]
    pub fn from_ggml(id: u32) -> Option<Encoding> {
        Some(match id {
            0 => Encoding::F32,
            1 => Encoding::F16,
            2 => Encoding::Quantised(GgmlDType::Q4_0),
            3 => Encoding::Quantised(GgmlDType::Q4_1),
            6 => Encoding::Quantised(GgmlDType::Q5_0),
            7 => Encoding::Quantised(GgmlDType::Q5_1),
            8 => Encoding::Quantised(GgmlDType::Q8_0),
            10 => Encoding::Quantised(GgmlDType::Q2K),
            11 => Encoding::Quantised(GgmlDType::Q3K),
            12 => Encoding::Quantised(GgmlDType::Q4K),
            13 => Encoding::Quantised(GgmlDType::Q5K),
            14 => Encoding::Quantised(GgmlDType::Q6K),
            30 => Encoding::Bf16,
            _ => return None,
        })
    }

    /// Values that are stored together.
    #[must_use]
    pub fn block_values(self) -> u64 {
        match self {
            Encoding::F32 | Encoding::F16 | Encoding::Bf16 => 1,
            Encoding::Quantised(dtype) => dtype.block_size() as u64,
        }
    }

    /// Bytes of [`Encoding::block_values`] values.
    #[must_use]
    pub fn block_bytes(self) -> u64 {
        match self {
            Encoding::F32 => 4,
            Encoding::F16 | Encoding::Bf16 => 2,
            Encoding::Quantised(dtype) => dtype.type_size() as u64,
        }
    }

    /// Bytes of `values` values, a whole number of blocks.
    #[must_use]
    pub fn bytes(self, values: u64) -> u64 {
        values / self.block_values() * self.block_bytes()
    }

    /// Bytes of a tensor of `shape`; the error says what is wrong with the shape.
    pub fn tensor_bytes(self, shape: &[u64]) -> std::result::Result<u64, String> {
        let values = shape
            .iter()
            .try_fold(1u64, |product, &dim| product.checked_mul(dim))
            .filter(|&values| values <= u64::MAX / 4)
            .ok_or_else(|| format!("has the dimensions {shape:?}, whose product overflows"))?;
        if values == 0 {
            return Err(format!("is empty: dimensions {shape:?}"));
        }
        let cols = shape.last().copied().unwrap_or(1);
        if cols % self.block_values() != 0 {
            let block = self.block_values();
            return Err(format!("has rows of {cols} values, not a multiple of {block}"));
        }
        Ok(self.bytes(values))
    }

    /// Decodes `raw`, a whole number of blocks starting at an even address, into `values`.
    fn decode(self, raw: &[u8], values: &mut [f32]) -> candle_core::Result<()> {
        match self {
            Encoding::F32 => {
                for (value, bytes) in values.iter_mut().zip(raw.as_chunks().0) {
                    *value = f32::from_le_bytes(*bytes);
                }
            }
            Encoding::F16 => bytemuck::cast_slice::<u8, f16>(raw).convert_to_f32_slice(values),
            Encoding::Bf16 => {
                for (value, bytes) in values.iter_mut().zip(raw.as_chunks().0) {
                    *value = bf16::from_le_bytes(*bytes).to_f32();
                }
            }
            Encoding::Quantised(dtype) => {
                let storage = QStorage::from_data(Cow::Borrowed(raw), &Device::Cpu, dtype)?;
                let decoded = QTensor::new(storage, values.len())?.dequantize(&Device::Cpu)?;
                values.copy_from_slice(&decoded.to_vec1::<f32>()?);
            }
        }
        Ok(())
    }
}

/// Where a tensor lies. The reader of the format has checked that the range is inside the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTensor {
    /// Index of the file.
    pub file: usize,
    /// First byte in the file.
    pub offset: u64,
    /// Number format.
    pub encoding: Encoding,
    /// Dimensions, the fastest-varying last.
    pub shape: Vec<u64>,
}

/// All tensors of a model on disk.
#[derive(Debug)]
pub struct Weights {
    files: Vec<SourceFile>,
    tensors: BTreeMap<String, StoredTensor>,
    naming: Naming,
    /// Width of a head, if the rows of q and k are stored in interleaved rotary order: 2i turns with 2i + 1.
    interleaved_head: Option<u32>,
    strip_values: u32,
}

impl Weights {
    /// Tensors of `files`. `interleaved_head` is the width of a head where q and k need reordering.
    #[must_use]
    pub fn new(
        files: Vec<SourceFile>,
        tensors: BTreeMap<String, StoredTensor>,
        naming: Naming,
        interleaved_head: Option<u32>,
    ) -> Self {
        Weights { files, tensors, naming, interleaved_head, strip_values: STRIP_VALUES }
    }

    /// Who named the tensors.
    #[must_use]
    pub fn naming(&self) -> Naming {
        self.naming
    }

    /// The files that the weights come from.
    #[must_use]
    pub fn files(&self) -> &[SourceFile] {
        &self.files
    }

    /// Checks that exactly the tensors of `wanted` exist, each with the shape given there. Those of `ignored` may
    /// exist beside them. What is missing makes the model incomplete; what is left over, unsupported: weights that
    /// the arithmetic does not know would change the result.
    pub fn check(&self, wanted: &[(Role, Vec<u32>)], ignored: &[&str]) -> Result<()> {
        let place = self.place();
        let mut missing = Vec::new();
        let mut known = std::collections::BTreeSet::new();
        for (role, shape) in wanted {
            let name = role.name(self.naming);
            let Some(stored) = self.tensors.get(&name) else {
                missing.push(name);
                continue;
            };
            if !stored.shape.iter().copied().eq(shape.iter().map(|&dim| u64::from(dim))) {
                return Err(PrepError::corrupt(
                    format!("{place}: tensor `{name}`"),
                    format!("has the shape {:?}; the configuration wants {shape:?}", stored.shape),
                ));
            }
            known.insert(name);
        }
        if !missing.is_empty() {
            let shown = missing[..missing.len().min(8)].join(", ");
            let rest = if missing.len() > 8 { ", …" } else { "" };
            let count = missing.len();
            return Err(PrepError::incomplete(
                place,
                format!("{count} tensors missing: {shown}{rest}"),
            ));
        }
        let is_extra = |name: &&String| {
            !known.contains(*name) && !ignored.iter().any(|ending| name.ends_with(ending))
        };
        match self.tensors.keys().find(is_extra) {
            Some(name) => Err(PrepError::unsupported(format!(
                "tensor `{name}` is no part of the architecture ({place})"
            ))),
            None => Ok(()),
        }
    }

    /// The shape of the tensor that plays `role`, if there is one.
    #[must_use]
    pub fn shape(&self, role: Role) -> Option<&[u64]> {
        self.tensors.get(&role.name(self.naming)).map(|stored| stored.shape.as_slice())
    }

    /// Bytes on disk of the tensor that plays `role`.
    #[must_use]
    pub fn stored_bytes(&self, role: Role) -> u64 {
        let stored = &self.tensors[&role.name(self.naming)];
        stored.encoding.bytes(stored.shape.iter().product())
    }

    /// All values of a tensor as one vector.
    pub fn vector(&self, role: Role) -> Result<Vec<f32>> {
        let tensor = self.tensor(role);
        let len =
            u32::try_from(tensor.stored.shape.iter().product::<u64>()).expect("shape was checked");
        let flat = Tensor { rows: 1, cols: len, ..tensor };
        let mut rows =
            Rows { tensor: flat, strip: Vec::new(), raw: Vec::new(), first: 0, count: 0 };
        rows.row(0)?;
        Ok(rows.strip)
    }

    /// The rows of a matrix, to be taken in order.
    #[must_use]
    pub fn rows(&self, role: Role) -> Rows<'_> {
        Rows { tensor: self.tensor(role), strip: Vec::new(), raw: Vec::new(), first: 0, count: 0 }
    }

    /// The rows of a matrix, to be taken in any order: each is read on its own.
    pub fn rows_in_any_order(&self, role: Role) -> Rows<'_> {
        let mut rows = self.rows(role);
        rows.tensor.strip_values = rows.tensor.cols;
        rows
    }

    /// The columns of a matrix, to be taken in any order. Holds the whole matrix, raw and as f32.
    pub fn columns_in_any_order(&self, role: Role) -> Result<Columns<'_>> {
        let mut columns = self.columns(role)?;
        let Tensor { rows, cols, .. } = columns.tensor;
        columns.tensor.strip_values = rows.saturating_mul(cols.next_multiple_of(UNIT));
        Ok(columns)
    }

    /// The columns of a matrix, to be taken in order. Holds the raw bytes of the whole matrix.
    pub fn columns(&self, role: Role) -> Result<Columns<'_>> {
        let tensor = self.tensor(role);
        let bytes = tensor.stored.encoding.bytes(u64::from(tensor.rows) * u64::from(tensor.cols));
        let mut raw = even_bytes(bytes);
        tensor.file.read_at(tensor.stored.offset, bytemuck::cast_slice_mut(&mut raw))?;
        Ok(Columns { tensor, raw, strip: Vec::new(), first: 0, count: 0 })
    }

    /// A tensor by role; it exists, because [`Weights::check`] has seen it.
    fn tensor(&self, role: Role) -> Tensor<'_> {
        let name = role.name(self.naming);
        let (name, stored) = self.tensors.get_key_value(&name).expect("Weights::check has seen it");
        let dim = |index: usize| {
            stored.shape.get(index).map_or(1, |&dim| u32::try_from(dim).expect("shape was checked"))
        };
        let head = match role {
            Role::Layer(_, Part::Query | Part::Key) => self.interleaved_head,
            _ => None,
        };
        let file = &self.files[stored.file];
        let (rows, cols, strip_values) = (dim(0), dim(1), self.strip_values);
        Tensor { name, stored, file, rows, cols, head, strip_values }
    }

    fn place(&self) -> String {
        let first = &self.files[0].path;
        let of_many = || first.parent().unwrap_or(first);
        (if self.files.len() == 1 { first } else { of_many() }).display().to_string()
    }
}

#[derive(Clone, Copy, Debug)]
struct Tensor<'a> {
    name: &'a str,
    stored: &'a StoredTensor,
    file: &'a SourceFile,
    rows: u32,
    cols: u32,
    /// Rows of a head in interleaved rotary order.
    head: Option<u32>,
    strip_values: u32,
}

impl Tensor<'_> {
    fn decode(&self, raw: &[u8], values: &mut [f32]) -> Result<()> {
        let fault = |problem: String| {
            PrepError::corrupt(
                format!("{}: tensor `{}`", self.file.path.display(), self.name),
                problem,
            )
        };
        self.stored.encoding.decode(raw, values).map_err(|problem| fault(problem.to_string()))?;
        match values.iter().find(|value| !value.is_finite()) {
            Some(value) => Err(fault(format!("holds {value}"))),
            None => Ok(()),
        }
    }
}

/// Room for `bytes` bytes at an even address, which ggml's blocks and half floats want.
fn even_bytes(bytes: u64) -> Vec<u16> {
    assert!(bytes.is_multiple_of(2), "every encoding takes an even number of bytes");
    vec![0; usize::try_from(bytes / 2).expect("a strip fits in memory")]
}

/// Rows of a matrix as f32, in order.
#[derive(Debug)]
pub struct Rows<'a> {
    tensor: Tensor<'a>,
    strip: Vec<f32>,
    raw: Vec<u16>,
    first: u32,
    count: u32,
}

impl Rows<'_> {
    /// Row `index`. Cheap when rows are asked for in order.
    pub fn row(&mut self, index: u32) -> Result<&[f32]> {
        if !(self.first..self.first + self.count).contains(&index) {
            self.load(index)?;
        }
        let cols = self.tensor.cols as usize;
        Ok(&self.strip[(index - self.first) as usize * cols..][..cols])
    }

    /// Loads the strip that starts with row `index`, or with its head where heads are reordered.
    fn load(&mut self, index: u32) -> Result<()> {
        let Tensor { rows, cols, head, stored, file, strip_values, .. } = self.tensor;
        let unit = head.unwrap_or(1);
        self.first = index / unit * unit;
        self.count = ((strip_values / cols / unit).max(1) * unit).min(rows - self.first);
        let row_bytes = stored.encoding.bytes(u64::from(cols));
        self.raw = even_bytes(row_bytes * u64::from(self.count));
        let raw = bytemuck::cast_slice_mut(&mut self.raw);
        file.read_at(stored.offset + u64::from(self.first) * row_bytes, raw)?;
        self.strip.resize(self.count as usize * cols as usize, 0.0);
        self.tensor.decode(raw, &mut self.strip)?;
        if let Some(head) = head {
            for rows in self.strip.chunks_exact_mut((head * cols) as usize) {
                split_halves(rows, cols as usize);
            }
        }
        Ok(())
    }
}

/// Reorders the rows of one head from interleaved (2i turns with 2i + 1) to half-split (i turns with i + half).
fn split_halves(rows: &mut [f32], cols: usize) {
    let interleaved = rows.to_vec();
    let half = rows.len() / cols / 2;
    for (index, row) in rows.chunks_exact_mut(cols).enumerate() {
        let from = if index < half { 2 * index } else { 2 * (index - half) + 1 };
        row.copy_from_slice(&interleaved[from * cols..][..cols]);
    }
}

/// Columns of a matrix as f32, in order.
#[derive(Debug)]
pub struct Columns<'a> {
    tensor: Tensor<'a>,
    raw: Vec<u16>,
    /// Transposed: one column after another.
    strip: Vec<f32>,
    first: u32,
    count: u32,
}

impl Columns<'_> {
    /// Column `index`. Cheap when columns are asked for in order.
    pub fn column(&mut self, index: u32) -> Result<&[f32]> {
        if !(self.first..self.first + self.count).contains(&index) {
            self.load(index)?;
        }
        let rows = self.tensor.rows as usize;
        Ok(&self.strip[(index - self.first) as usize * rows..][..rows])
    }

    /// Loads the strip that starts with the block of column `index`: the same blocks of every row, transposed.
    fn load(&mut self, index: u32) -> Result<()> {
        let Tensor { rows, cols, stored, strip_values, .. } = self.tensor;
        self.first = index / UNIT * UNIT;
        self.count = ((strip_values / rows / UNIT).max(1) * UNIT).min(cols - self.first);
        let row_bytes = stored.encoding.bytes(u64::from(cols)) as usize;
        let start = stored.encoding.bytes(u64::from(self.first)) as usize;
        let part = stored.encoding.bytes(u64::from(self.count)) as usize;
        let mut gathered = even_bytes(part as u64 * u64::from(rows));
        let into: &mut [u8] = bytemuck::cast_slice_mut(&mut gathered);
        let raw: &[u8] = bytemuck::cast_slice(&self.raw);
        for (row, into) in into.chunks_exact_mut(part).enumerate() {
            into.copy_from_slice(&raw[row * row_bytes + start..][..part]);
        }
        let (rows, count) = (rows as usize, self.count as usize);
        let mut values = vec![0.0; rows * count];
        self.tensor.decode(into, &mut values)?;
        self.strip.resize(rows * count, 0.0);
        for (row, values) in values.chunks_exact(count).enumerate() {
            for (column, &value) in values.iter().enumerate() {
                self.strip[column * rows + row] = value;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interleaved_rows_become_half_split() {
        let mut rows = [0., 0., 1., 1., 2., 2., 3., 3., 4., 4., 5., 5.];
        split_halves(&mut rows, 2);
        assert_eq!(rows, [0., 0., 2., 2., 4., 4., 1., 1., 3., 3., 5., 5.]);
    }

    /// A matrix of 12 x 576 whose value at (r, c) is r + c / 1024, as f32 or as Q8_0 with one scale for all.
    fn matrix(encoding: Encoding) -> Vec<u8> {
        let value = |i: u32| (i / 576) as f32 + (i % 576) as f32 / 1024.0;
        match encoding {
            Encoding::F32 => (0..12 * 576).flat_map(|i| value(i).to_le_bytes()).collect(),
            _ => {
                let tensor = candle_core::Tensor::from_iter((0..12 * 576).map(value), &Device::Cpu);
                let tensor = QTensor::quantize(&tensor.unwrap(), GgmlDType::Q8_0).unwrap();
                tensor.data().unwrap().into_owned()
            }
        }
    }

    #[test]
    fn strips_of_any_length_give_the_same_rows_and_columns() {
        for encoding in [Encoding::F32, Encoding::Quantised(GgmlDType::Q8_0)] {
            let bytes = matrix(encoding);
            let mut whole = vec![0.0; 12 * 576];
            let mut even = even_bytes(bytes.len() as u64);
            let raw: &mut [u8] = bytemuck::cast_slice_mut(&mut even);
            raw.copy_from_slice(&bytes);
            encoding.decode(raw, &mut whole).unwrap();
            let path = tempfile::NamedTempFile::new().unwrap().into_temp_path();
            std::fs::write(&path, &bytes).unwrap();
            let role = Role::Layer(0, Part::Query);
            let stored = StoredTensor { file: 0, offset: 0, encoding, shape: vec![12, 576] };
            let tensors = BTreeMap::from([(role.name(Naming::Gguf), stored)]);
            let file = SourceFile::open(&path).unwrap();
            let mut weights = Weights::new(vec![file], tensors, Naming::Gguf, Some(4));
            for strip_values in [1, 576 * 5, 576 * 8, 256 * 12, 1 << 20] {
                weights.strip_values = strip_values;
                let (mut rows, mut columns) = (weights.rows(role), weights.columns(role).unwrap());
                for row in 0..12 {
                    let stored = row / 4 * 4 + [0, 2, 1, 3][row % 4];
                    let wanted = &whole[stored * 576..][..576];
                    assert_eq!(rows.row(row as u32).unwrap(), wanted, "{strip_values}: row {row}");
                }
                let mut shuffled = weights.rows_in_any_order(role);
                for row in [7, 0, 11, 3] {
                    assert_eq!(shuffled.row(row).unwrap(), rows.row(row).unwrap());
                }
                let mut in_any_order = weights.columns_in_any_order(role).unwrap();
                for column in (0..576).rev() {
                    let wanted: Vec<f32> = (0..12).map(|row| whole[row * 576 + column]).collect();
                    for columns in [&mut columns, &mut in_any_order] {
                        let found = columns.column(column as u32).unwrap();
                        assert_eq!(found, wanted, "{strip_values}: column {column}");
                    }
                }
            }
        }
    }

    #[test]
    fn overflowing_dimensions_are_refused() {
        let error = Encoding::F32.tensor_bytes(&[1 << 40, 1 << 40]).unwrap_err();
        assert!(error.contains("overflows"), "{error}");
        assert!(
            Encoding::from_ggml(2)
                .unwrap()
                .tensor_bytes(&[4, 33])
                .unwrap_err()
                .contains("multiple of 32")
        );
    }
}
