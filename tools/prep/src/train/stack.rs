//! [`Model`]: a stack of hashing layers in training (Eq. 10, 11), P of them side by side, and the head behind them.
//!
//! Behind every sign and every integer of the packed form stands a real number; forward rounds it ([`Step`]) and then
//! computes what `ls-hash` computes, on integers that f32 holds exactly. Only the factors of the blocks' scores are
//! rounded at the end ([`Model::pack_blocks`]).

use super::features::Features;
use super::lookup::{Relaxation, look_up};
use super::product::{Leveling, Project, Scoring, check_width};
use super::sign::{Step, grid};
use crate::device;
use candle_core::{Result, Tensor, Var};
use ls_hash::{MAX_LEVEL, PlaneBits};
use rand::Rng;
use rand_xoshiro::Xoshiro256PlusPlus;

/// Standard deviations of a plane's sum at which its level is the largest.
const LEVEL_RANGE: f32 = 2.5;
/// Of the real numbers behind signs, at the beginning: small, so that they can change.
const SIGN_DEVIATION: f32 = 0.3;

/// Sizes of a stack.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// Numbers of a feature.
    pub dims: usize,
    /// Hashing layers.
    pub layers: usize,
    /// Stacks side by side (P).
    pub stacks: usize,
    /// Bits of an index (τ).
    pub tau: usize,
    /// Signs of a table's row (d); 0: the last layer has no table, which needs a single layer unless the head takes
    /// an index.
    pub width: usize,
    /// Of the hyperplanes' weights.
    pub plane_bits: PlaneBits,
    /// What comes behind.
    pub head: HeadShape,
}

/// What a stack's output is used for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum HeadShape {
    /// The index that the last layer spells, which has no table: a class or a bin. One stack.
    Index,
    /// A score for each block.
    Blocks {
        /// Number of blocks.
        blocks: usize,
        /// Whether the code is the sizes of the sums, not their signs alone. One layer without table.
        levels: bool,
    },
}

impl Shape {
    /// Bits of a layer's hash.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.stacks * self.tau
    }

    /// Layers that have a table.
    #[must_use]
    pub fn tables(&self) -> usize {
        let last = self.head != HeadShape::Index && self.width > 0;
        self.layers - usize::from(!last)
    }

    /// Elements of the last layer's code.
    #[must_use]
    pub fn code_bits(&self) -> usize {
        if self.tables() == self.layers { self.stacks * self.width } else { self.rows() }
    }

    /// What is wrong with it.
    pub fn check(&self) -> std::result::Result<(), String> {
        let index = self.head == HeadShape::Index;
        let levels = matches!(self.head, HeadShape::Blocks { levels: true, .. });
        let wrong = |problem: &str| Err(problem.to_owned());
        if self.dims == 0 || self.layers == 0 || self.stacks == 0 || self.tau == 0 {
            return wrong("a stack has features, layers, stacks and bits of an index");
        }
        if index && self.stacks != 1 {
            return wrong("classes and numbers are read from one stack's index");
        }
        if self.tables() > 0 && (self.width == 0 || !self.width.is_multiple_of(8)) {
            return wrong("a table's width is a multiple of 8, and 0 only without tables");
        }
        if self.tables() > 0 && self.tau > ls_hash::limits::MAX_TAU {
            return wrong("an index into a table has at most 12 bits");
        }
        if levels && (self.layers != 1 || self.tables() != 0) {
            return wrong("levels want one layer without table");
        }
        Ok(())
    }
}

/// Parameters in training.
#[derive(Debug)]
pub struct Model {
    pub(super) shape: Shape,
    /// rows x dims, of deviation 1.
    planes: Var,
    /// In units of the sums' deviation; rows.
    plane_bias: Var,
    /// Of layers behind the first: rows x code.
    hashes: Vec<Var>,
    /// stacks x 2^tau x width.
    tables: Vec<Var>,
    pub(super) head: Option<BlockVars>,
}

/// Parameters of a head that scores blocks.
#[derive(Debug)]
pub(super) struct BlockVars {
    /// Of levels, around 1; code.
    gains: Option<Var>,
    /// blocks x code.
    signs: Var,
    /// Scales, around 1, and biases; 2 x blocks.
    factors: Var,
}

fn normal(draw: &mut Xoshiro256PlusPlus) -> f32 {
    let (u, v): (f32, f32) = (draw.random_range(f32::EPSILON..1.0), draw.random());
    (-2.0 * u.ln()).sqrt() * (std::f32::consts::TAU * v).cos()
}

pub(super) fn random(
    shape: impl Into<candle_core::Shape>,
    deviation: f32,
    draw: &mut Xoshiro256PlusPlus,
) -> Result<Var> {
    let shape = shape.into();
    let values: Vec<f32> = (0..shape.elem_count()).map(|_| deviation * normal(draw)).collect();
    Var::from_tensor(&Tensor::from_vec(values, shape, device::current())?)
}

impl Model {
    /// A random stack of a shape that [`Shape::check`] approves. `biases`: what the blocks' scores begin as.
    pub fn new(shape: Shape, biases: &[f32], draw: &mut Xoshiro256PlusPlus) -> Result<Model> {
        let (rows, code) = (shape.rows(), shape.code_bits());
        let ones = |len: usize| Tensor::ones(len, candle_core::DType::F32, device::current());
        let between = shape.stacks * shape.width;
        let head = match shape.head {
            HeadShape::Index => None,
            HeadShape::Blocks { blocks, levels } => Some(BlockVars {
                gains: if levels { Some(Var::from_tensor(&ones(code)?)?) } else { None },
                signs: random((blocks, code), SIGN_DEVIATION, draw)?,
                factors: {
                    let both = [&vec![1.0; blocks], biases].concat();
                    Var::from_vec(both, (2, blocks), device::current())?
                },
            }),
        };
        Ok(Model {
            shape,
            planes: random((rows, shape.dims), 1.0, draw)?,
            plane_bias: Var::zeros(rows, candle_core::DType::F32, device::current())?,
            hashes: (1..shape.layers)
                .map(|_| random((rows, between), SIGN_DEVIATION, draw))
                .collect::<Result<_>>()?,
            tables: (0..shape.tables())
                .map(|_| random((shape.stacks, 1 << shape.tau, shape.width), SIGN_DEVIATION, draw))
                .collect::<Result<_>>()?,
            head,
        })
    }

    /// Its sizes.
    #[must_use]
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// All parameters.
    #[must_use]
    pub fn vars(&self) -> Vec<Var> {
        let mut vars = vec![self.planes.clone(), self.plane_bias.clone()];
        vars.extend(self.hashes.iter().chain(&self.tables).cloned());
        if let Some(head) = &self.head {
            vars.extend([&head.signs, &head.factors].map(Var::clone));
            vars.extend(head.gains.clone());
        }
        vars
    }

    /// Standard deviation of the sums of random planes, about.
    fn spread(&self) -> f32 {
        (self.shape.dims as f32).sqrt() * grid(self.shape.plane_bits) * Features::DEVIATION
    }

    /// The hyperplanes' integer weights, rows x dims.
    pub(super) fn plane_weights(&self) -> Result<Tensor> {
        Step::Weight(self.shape.plane_bits).apply(&self.planes)
    }

    /// The integers that are added to the planes' sums.
    pub(super) fn plane_biases(&self) -> Result<Tensor> {
        Step::Integer(self.spread()).apply(&self.plane_bias)
    }

    /// The signs of the hashes behind the first layer's, each rows x code.
    pub(super) fn hash_signs(&self) -> Result<Vec<Tensor>> {
        self.hashes.iter().map(|hash| Step::Sign.apply(hash)).collect()
    }

    /// The tables' signs, each stacks x 2^tau x width.
    pub(super) fn table_signs(&self) -> Result<Vec<Tensor>> {
        self.tables.iter().map(|table| Step::Sign.apply(table)).collect()
    }

    /// What the planes' sums are multiplied with to be levels, if the code is of levels.
    pub(super) fn level_gains(&self) -> Result<Option<Tensor>> {
        let gains = self.head.as_ref().and_then(|head| head.gains.as_ref());
        let unit = f64::from(f32::from(MAX_LEVEL) / LEVEL_RANGE / self.spread());
        gains.map(|gains| gains.affine(unit, 0.0)).transpose()
    }

    /// Scales and biases of the blocks, 2 x blocks.
    fn factors(&self, head: &BlockVars) -> Result<Tensor> {
        let typical = if head.gains.is_some() { f32::from(MAX_LEVEL) / LEVEL_RANGE } else { 1.0 };
        let unit = 1.0 / (typical * (self.shape.code_bits() as f32).sqrt());
        let units = Tensor::from_slice(&[unit, 1.0], (2, 1), device::current())?;
        head.factors.broadcast_mul(&units)
    }

    /// The blocks' signs (blocks x code), the scales of their products with the code, and the biases.
    pub(super) fn block_parts(&self, head: &BlockVars) -> Result<(Tensor, Vec<f32>, Vec<f32>)> {
        let factors = self.factors(head)?.to_vec2()?;
        let [scales, biases] = factors.try_into().expect("two rows");
        Ok((Step::Sign.apply(&head.signs)?, scales, biases))
    }

    /// The last layer's code (batch x code: signs or levels), or the margins behind the last index (batch x tau), for
    /// rounded features (batch x dims). Without `relaxation` tables let no gradient through.
    pub fn code(
        &self,
        features: &Tensor,
        mut relaxation: Option<&mut Relaxation<'_>>,
    ) -> Result<Tensor> {
        check_width(features, self.shape.dims)?;
        let project = Project {
            features: features.clone(),
            weight: Step::Weight(self.shape.plane_bits),
            bias: Step::Integer(self.spread()),
        };
        let sums = project.apply(&self.planes, &self.plane_bias)?;
        if let Some(gains) = self.level_gains()? {
            return Leveling.apply(&sums, &gains);
        }
        let mut margins = sums.affine(f64::from(1.0 / self.spread()), 0.0)?;
        let between = (self.shape.stacks * self.shape.width) as f64;
        for (layer, table) in self.tables.iter().enumerate() {
            let code = look_up(&margins, table, relaxation.as_deref_mut())?;
            match self.hashes.get(layer) {
                Some(hash) => {
                    let signs = Step::Sign.apply(hash)?;
                    margins = code.matmul(&signs.t()?)?.affine(1.0 / between.sqrt(), 0.0)?;
                }
                None => return Ok(code),
            }
        }
        if self.shape.head == HeadShape::Index { Ok(margins) } else { Step::Sign.apply(&margins) }
    }

    /// Scores of all blocks (batch x blocks), or the margins behind the index (batch x tau).
    pub fn forward(
        &self,
        features: &Tensor,
        relaxation: Option<&mut Relaxation<'_>>,
    ) -> Result<Tensor> {
        let code = self.code(features, relaxation)?;
        let Some(head) = &self.head else { return Ok(code) };
        Scoring { weight: Step::Sign }.apply(&code, &head.signs, &self.factors(head)?)
    }
}
