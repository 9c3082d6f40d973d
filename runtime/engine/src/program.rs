//! [`Program`]: one walk through the model as a flat list of steps, and where the weights of each step come from.
//!
//! The file is cut into *sections*, in file order: one a layer, then the head (where it is a matrix of its own), then
//! the embedding. Each section keeps a prefix resident; its tail is streamed anew in every pass, cut into *pieces* of
//! about `request_bytes`, one read each. File order is order of use, so the pieces of a pass are one ascending scan,
//! and what is resident never has to be read again (for a cyclic scan nothing beats pinning).
//!
//! Built once at open from the memory plan; executing it allocates nothing.

use ls_bundle::extent::Extent;
use ls_bundle::ids::LayerId;
use ls_bundle::model::{FfnExtent, LayerExtents, MatrixExtent, WeightMap};
use ls_cache::Blocks;
use ls_compute::Projection;

/// How a pass treats the FFNs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Walk {
    /// Every neuron runs, in the order of the file.
    Dense,
    /// Each FFN is one step, [`Step::Ffn`], that sees to its own weights.
    Sparse,
}

/// A section of the file: bytes `start .. cut` are resident, `cut .. end` are streamed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Section {
    /// First byte.
    pub start: u64,
    /// First streamed byte; on a boundary of a tile or block.
    pub cut: u64,
    /// First byte behind the section.
    pub end: u64,
}

impl Section {
    /// The resident prefix.
    #[must_use]
    pub fn resident(&self) -> Extent {
        Extent { offset: self.start, len: self.cut - self.start }
    }

    /// Bytes that each pass streams.
    #[must_use]
    pub fn streamed_bytes(&self) -> u64 {
        self.end - self.cut
    }
}

/// The matrix that a projection reads.
#[must_use]
pub fn matrix_of(layer: &LayerExtents, projection: Projection) -> &MatrixExtent {
    match projection {
        Projection::Query => &layer.q_proj,
        Projection::Key => &layer.k_proj,
        Projection::Value => &layer.v_proj,
        Projection::Output => &layer.o_proj,
    }
}

/// Where a step finds its weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// In the resident prefix of section `section`, `at` bytes from the section's start.
    Resident {
        /// Index of the section.
        section: u32,
        /// Bytes from the section's start.
        at: u64,
    },
    /// In piece `piece`, `at` bytes from the piece's first weight.
    Piece {
        /// Index of the piece in its pass.
        piece: u32,
        /// Bytes from the piece's first weight.
        at: u64,
    },
}

/// Some rows of a layer's dense matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Which matrix.
    pub projection: Projection,
    /// First row.
    pub first_row: u32,
    /// Number of rows.
    pub rows: u32,
    /// Where they are.
    pub source: Source,
}

/// Most parts of one [`Step::Project`]: q, k and v.
pub const MAX_PARTS: usize = 3;

/// One call into the backend, in order of execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// RMSNorm before attention.
    AttnInput(LayerId),
    /// Rows of q, k, v, or of o: `parts[first .. first + count]` of the program, all from one source.
    Project {
        /// Layer.
        layer: LayerId,
        /// First part.
        first: u32,
        /// Number of parts, 1 ..= [`MAX_PARTS`].
        count: u32,
    },
    /// Attention.
    Attend(LayerId),
    /// RMSNorm before the FFN.
    MlpInput(LayerId),
    /// Some blocks of neurons.
    Mlp {
        /// Layer.
        layer: LayerId,
        /// First block in the layer.
        first_block: u32,
        /// Number of blocks.
        blocks: u32,
        /// Where they are.
        source: Source,
    },
    /// All of a layer's neurons that are chosen to run, wherever they are.
    Ffn(LayerId),
    /// The FFN's sum joins the residual.
    MlpOutput(LayerId),
    /// Final RMSNorm.
    HeadInput,
    /// Some rows of the head.
    Head {
        /// First row.
        first_row: u32,
        /// Number of rows.
        rows: u32,
        /// Where they are.
        source: Source,
    },
    /// The piece will not be used again in this pass.
    Release(u32),
}

/// See the module's documentation.
#[derive(Clone, Debug)]
pub struct Program {
    /// Sections in file order: layers, head (untied), embedding.
    pub sections: Vec<Section>,
    /// Steps in order of execution.
    pub steps: Vec<Step>,
    /// Parts of the projection steps.
    pub parts: Vec<Part>,
    /// The reads of one pass, in order.
    pub pieces: Vec<Extent>,
}

/// The matrix or FFN that a stretch of bytes belongs to.
#[derive(Clone, Copy)]
enum Operand<'a> {
    Matrix(Projection, &'a MatrixExtent),
    Ffn(&'a FfnExtent),
    Head(&'a MatrixExtent),
}

impl Operand<'_> {
    fn extent(&self) -> Extent {
        match self {
            Operand::Matrix(_, m) | Operand::Head(m) => m.extent(),
            Operand::Ffn(f) => f.extent(),
        }
    }

    /// Bytes of the smallest part that may be cut off: a tile or a block. The last one may be shorter.
    fn unit(&self) -> u64 {
        match self {
            Operand::Matrix(_, m) | Operand::Head(m) => u64::from(m.tile_rows) * m.row_bytes(),
            Operand::Ffn(f) => f.block_stride(),
        }
    }
}

/// Bounds of every section of a file, all resident.
#[must_use]
pub fn sections(map: &WeightMap) -> Vec<Section> {
    let whole = |first: Extent, last: Extent| Section {
        start: first.offset,
        cut: last.end(),
        end: last.end(),
    };
    let mut sections: Vec<Section> =
        map.layers.iter().map(|l| whole(l.q_proj.extent(), l.ffn.extent())).collect();
    sections.extend(map.head.iter().map(|head| whole(head.extent(), head.extent())));
    sections.push(whole(map.embedding.extent(), map.embedding.extent()));
    sections
}

/// The last boundary of a tile or block in section `index` that is not above `start + resident_bytes`.
#[must_use]
pub fn cut_at(map: &WeightMap, index: usize, resident_bytes: u64) -> u64 {
    let operands = operands_of(map, index);
    let start = operands[0].extent().offset;
    boundary_below(&operands, start.saturating_add(resident_bytes))
}

fn layer_operands(layer: &LayerExtents) -> [Operand<'_>; 5] {
    [
        Operand::Matrix(Projection::Query, &layer.q_proj),
        Operand::Matrix(Projection::Key, &layer.k_proj),
        Operand::Matrix(Projection::Value, &layer.v_proj),
        Operand::Matrix(Projection::Output, &layer.o_proj),
        Operand::Ffn(&layer.ffn),
    ]
}

fn operands_of(map: &WeightMap, section: usize) -> Vec<Operand<'_>> {
    match map.layers.get(section) {
        Some(layer) => layer_operands(layer).to_vec(),
        None if section == map.layers.len() && map.head.is_some() => {
            map.head.iter().map(Operand::Head).collect()
        }
        None => vec![Operand::Head(&map.embedding)],
    }
}

impl Program {
    /// Builds the walk for `sections` (of [`sections`], with the plan's cuts).
    #[must_use]
    pub fn new(map: &WeightMap, sections: Vec<Section>, request_bytes: u64, walk: Walk) -> Program {
        let mut program =
            Program { sections, steps: Vec::new(), parts: Vec::new(), pieces: Vec::new() };
        for (index, layer) in map.layers.iter().enumerate() {
            program.layer(LayerId(index as u16), index, layer, request_bytes, walk);
        }
        // A tied head is the embedding; an untied embedding is read by rows, never walked.
        let head = map.layers.len();
        let matrix = map.head.as_ref().unwrap_or(&map.embedding);
        program.steps.push(Step::HeadInput);
        let spans = program.spans(head, &[Operand::Head(matrix)], request_bytes);
        program.emit(LayerId(0), &[Operand::Head(matrix)], &spans);
        program
    }

    /// Bytes that one pass streams.
    #[must_use]
    pub fn streamed_bytes(&self) -> u64 {
        self.pieces.iter().map(|p| p.len).sum()
    }

    /// Bytes of the resident prefixes.
    #[must_use]
    pub fn resident_bytes(&self) -> u64 {
        self.sections.iter().map(|s| s.resident().len).sum()
    }

    fn layer(
        &mut self,
        layer: LayerId,
        section: usize,
        extents: &LayerExtents,
        request: u64,
        walk: Walk,
    ) {
        let operands = &layer_operands(extents)[..match walk {
            Walk::Dense => 5,
            Walk::Sparse => 4,
        }];
        let spans = self.spans(section, operands, request);
        self.steps.push(Step::AttnInput(layer));
        self.emit(layer, &operands[..3], &spans);
        self.steps.push(Step::Attend(layer));
        self.emit(layer, &operands[3..4], &spans);
        self.steps.push(Step::MlpInput(layer));
        match walk {
            Walk::Dense => self.emit(layer, &operands[4..], &spans),
            Walk::Sparse => self.steps.push(Step::Ffn(layer)),
        }
        self.steps.push(Step::MlpOutput(layer));
    }

    /// Cuts a section into its resident prefix and its pieces: byte ranges with a source for their first byte.
    fn spans(
        &mut self,
        index: usize,
        operands: &[Operand<'_>],
        request: u64,
    ) -> Vec<(Extent, Source)> {
        let section = self.sections[index];
        let mut spans = Vec::new();
        if section.cut > section.start {
            spans.push((section.resident(), Source::Resident { section: index as u32, at: 0 }));
        }
        // Equal pieces of at most about a request, each cut rounded down to the boundary before it.
        let end = operands.last().expect("operands are given").extent().end();
        let streamed_bytes = end.saturating_sub(section.cut);
        let count = streamed_bytes.div_ceil(request.max(1));
        let mut from = section.cut;
        for piece in 1..=count {
            let ideal = section.cut
                + (u128::from(streamed_bytes) * u128::from(piece) / u128::from(count)) as u64;
            let to = boundary_below(operands, ideal);
            if to > from {
                let extent = Extent { offset: from, len: to - from };
                spans.push((extent, Source::Piece { piece: self.pieces.len() as u32, at: 0 }));
                self.pieces.push(extent);
                from = to;
            }
        }
        spans
    }

    /// Emits the steps of `operands`, span by span; a piece is released when the last of its bytes has been used.
    fn emit(&mut self, layer: LayerId, operands: &[Operand<'_>], spans: &[(Extent, Source)]) {
        for &(span, source) in spans {
            let first_part = self.parts.len();
            for operand in operands {
                let extent = operand.extent();
                let (from, to) = (span.offset.max(extent.offset), span.end().min(extent.end()));
                if from < to {
                    self.operand_step(
                        layer,
                        operand,
                        from - extent.offset,
                        to - extent.offset,
                        match source {
                            Source::Resident { section, .. } => {
                                Source::Resident { section, at: from - span.offset }
                            }
                            Source::Piece { piece, .. } => {
                                Source::Piece { piece, at: from - span.offset }
                            }
                        },
                    );
                }
            }
            let count = (self.parts.len() - first_part) as u32;
            if count > 0 {
                self.steps.push(Step::Project { layer, first: first_part as u32, count });
            }
            let last = operands.last().expect("operands are given").extent();
            if let Source::Piece { piece, .. } = source {
                let used_here =
                    span.end() > operands[0].extent().offset && span.offset < last.end();
                if used_here && span.end() <= last.end() {
                    self.steps.push(Step::Release(piece));
                }
            }
        }
    }

    fn operand_step(
        &mut self,
        layer: LayerId,
        operand: &Operand<'_>,
        from: u64,
        to: u64,
        source: Source,
    ) {
        // A range that ends with the operand includes its padding; rows and blocks are counted without.
        let rows = |m: &MatrixExtent| {
            let first = (from / m.row_bytes()) as u32;
            (first, ((to / m.row_bytes()) as u32).min(m.rows) - first)
        };
        match operand {
            Operand::Matrix(projection, m) => {
                let (first_row, rows) = rows(m);
                self.parts.push(Part { projection: *projection, first_row, rows, source });
            }
            Operand::Ffn(f) => {
                let (first, end) = (from / f.block_stride(), to / f.block_stride());
                let (first_block, blocks) = (first as u32, (end - first) as u32);
                self.steps.push(Step::Mlp { layer, first_block, blocks, source });
            }
            Operand::Head(m) => {
                let (first_row, rows) = rows(m);
                self.steps.push(Step::Head { first_row, rows, source });
            }
        }
    }
}

/// The last boundary of a tile or block not above `offset`.
fn boundary_below(operands: &[Operand<'_>], offset: u64) -> u64 {
    for operand in operands.iter().rev() {
        let extent = operand.extent();
        if offset >= extent.end() {
            return extent.end();
        }
        if offset > extent.offset {
            return offset - (offset - extent.offset) % operand.unit();
        }
    }
    operands[0].extent().offset
}

/// The blocks of all FFNs.
#[must_use]
pub(crate) fn blocks_of(map: &WeightMap) -> Blocks {
    let ffn = map.layers.iter().map(|layer| layer.ffn);
    Blocks::new(ffn.map(|ffn| ffn.first_block.0..ffn.first_block.0 + ffn.blocks()).collect())
}
