//! Every byte of the budget is planned: plans never pass it, use it, and say what is missing.

use ls_bundle::ids::ByteCount;
use ls_bundle::model::{
    Architecture, DType, ModelConfig, RopeConfig, RopeScaling, SpecialTokens, WeightMap,
    WeightTypes,
};
use ls_bundle::plan_weights;
use ls_engine::memory::{BackendBytes, Budget, MemoryPlan, PlanRequest, SparseNeeds};
use ls_io::Alignment;
use proptest::prelude::*;

/// SmolLM2-135M's shape.
fn smollm2() -> (ModelConfig, WeightMap) {
    let config = ModelConfig {
        architecture: Architecture::Llama,
        name: "smollm2".into(),
        vocab_size: 49152,
        hidden: 576,
        ffn_hidden: 1536,
        layers: 30,
        heads: 9,
        kv_heads: 3,
        head_dim: 64,
        norm_epsilon: 1e-5,
        rope: RopeConfig { theta: 1e5, scaling: RopeScaling::None },
        context_length: 8192,
        sliding_window: None,
        tied_head: true,
        qkv_bias: false,
        qk_norm: false,
        special: SpecialTokens::default(),
    };
    let map = plan_weights(&config, WeightTypes::all(DType::F16), 2).unwrap();
    (config, map)
}

fn backend_bytes(context: u32, pass_tokens: u32) -> BackendBytes {
    BackendBytes {
        kv_cache: ByteCount(30 * 2 * 192 * 2 * u64::from(context)),
        activations: ByteCount(400_000 + 20_000 * u64::from(pass_tokens)),
    }
}

fn request(budget: Budget) -> PlanRequest {
    PlanRequest {
        budget,
        fixed: ByteCount::mib(20),
        context: None,
        prompt_tokens: 512,
        alignment: Alignment { offset: 4096, memory: 4096 },
        request_bytes: 1 << 20,
        depth: 8,
        sparse: None,
        read_cost_bytes: 0,
    }
}

fn fit(request: &PlanRequest) -> Result<MemoryPlan, ls_engine::memory::BudgetTooSmall> {
    let (config, map) = smollm2();
    MemoryPlan::fit(request, &config, &map, &backend_bytes)
}

proptest! {
    #[test]
    fn a_plan_never_passes_its_budget_and_wastes_little(mib in 30u64..400, context in prop::option::of(1u32..4096), prompt in 1u32..3000) {
        let request = PlanRequest { context, prompt_tokens: prompt, ..request(Budget::Total(ByteCount::mib(mib))) };
        let (config, map) = smollm2();
        let minimum = MemoryPlan::minimum(&request, &config, &map, &backend_bytes);
        match MemoryPlan::fit(&request, &config, &map, &backend_bytes) {
            Ok(plan) => {
                prop_assert!(plan.planned() <= plan.budget);
                prop_assert!(plan.budget >= minimum);
                prop_assert_eq!(plan.resident() + plan.streamed(&map), plan.weights);
                let streaming = plan.streamed(&map) > ByteCount::ZERO;
                prop_assert_eq!(streaming, plan.depth >= 2);
                // Cuts are rounded down to tiles and blocks: at most one a section is lost.
                let lost = plan.budget.saturating_sub(plan.planned());
                prop_assert!(!streaming || lost <= ByteCount(32 * 150_000), "{} unused of {}", lost, plan.budget);
            }
            Err(error) => prop_assert!(error.budget < error.minimum && error.minimum == minimum),
        }
    }
}

#[test]
fn the_minimum_works_and_one_byte_less_does_not() {
    let (config, map) = smollm2();
    let ask = |bytes| request(Budget::Total(ByteCount(bytes)));
    let minimum = MemoryPlan::minimum(&ask(0), &config, &map, &backend_bytes).0;
    assert!(fit(&ask(minimum)).is_ok());
    let error = fit(&ask(minimum - 1)).unwrap_err();
    assert_eq!(error.minimum.0, minimum);
    assert!(error.to_string().contains(&minimum.to_string()), "{error}");
}

#[test]
fn a_default_context_is_lowered_and_an_explicit_one_refused() {
    let small = request(Budget::Total(ByteCount::mib(48)));
    let plan = fit(&small).unwrap();
    assert_eq!(plan.context_lowered_from, Some(2048));
    assert!(plan.context < 2048 && plan.context >= 128);
    let explicit = PlanRequest { context: Some(2048), ..small };
    assert!(fit(&explicit).is_err());
}

#[test]
fn dense_tensors_go_first_and_everything_fits_in_the_end() {
    let plan = fit(&request(Budget::Total(ByteCount::mib(220)))).unwrap();
    let (_, map) = smollm2();
    let ffn: u64 = map.layers.iter().map(|l| l.ffn.extent().len).sum();
    assert_eq!(plan.resident_dense.0, plan.weights.0 - ffn, "all dense tensors are resident");
    assert!(plan.resident_ffn.0 > 0 && plan.resident_ffn.0 < ffn);
    let plan = fit(&request(Budget::Total(ByteCount::mib(400)))).unwrap();
    assert_eq!(plan.resident(), plan.weights);
    assert_eq!((plan.depth, plan.io_buffers), (0, ByteCount::ZERO));
}

#[test]
fn layers_keep_the_same_share() {
    let plan = fit(&request(Budget::Total(ByteCount::mib(220)))).unwrap();
    let streamed: Vec<u64> = plan.sections[..30].iter().map(|s| s.streamed_bytes()).collect();
    assert!(streamed.iter().all(|&s| s == streamed[0] && s > 0), "{streamed:?}");
}

#[test]
fn a_weight_cache_is_a_share_of_the_weights_with_the_rest_on_top() {
    let plan = fit(&request(Budget::WeightCache(0.2))).unwrap();
    let share = plan.resident().0 as f64 / plan.weights.0 as f64;
    assert!((0.18..=0.2).contains(&share), "{share}");
    let plan = fit(&request(Budget::WeightCache(1.0))).unwrap();
    assert_eq!(plan.resident(), plan.weights);
}

#[test]
fn with_all_weights_cached_every_block_has_a_slot() {
    let (_, map) = smollm2();
    let blocks: u32 = map.layers.iter().map(|layer| layer.ffn.blocks()).sum();
    for (table_mib, read_cost_bytes) in [(0, 0), (40, 12_000), (400, 64 << 10), (0, 1 << 20)] {
        let needs =
            SparseNeeds { table_bytes: table_mib << 20, book_bytes: 1 << 20, visit_blocks: 150 };
        let all = Budget::WeightCache(1.0);
        let asked = PlanRequest { sparse: Some(needs), read_cost_bytes, ..request(all) };
        let plan = fit(&asked).unwrap();
        assert_eq!((plan.slots, plan.passing), (blocks, 0), "{table_mib}, {read_cost_bytes}");
        assert!(plan.planned() <= plan.budget);
    }
}

#[test]
fn reading_together_takes_what_is_spare_and_never_raises_the_minimum() {
    let (config, map) = smollm2();
    let needs = SparseNeeds { table_bytes: 40 << 20, book_bytes: 1 << 20, visit_blocks: 0 };
    let ask = |bytes, read_cost_bytes| PlanRequest {
        sparse: Some(needs),
        read_cost_bytes,
        ..request(Budget::Total(ByteCount(bytes)))
    };
    let minimum = |cost| MemoryPlan::minimum(&ask(0, cost), &config, &map, &backend_bytes);
    assert_eq!(minimum(0), minimum(64 << 10));
    let smallest = fit(&ask(minimum(0).0, 64 << 10)).unwrap();
    assert_eq!(smallest.merge, None);
    for mib in [100, 130, 200] {
        let plan = fit(&ask(mib << 20, 12_000)).unwrap();
        let merge = plan.merge.expect("there is room");
        assert!(merge.span_bytes >= 2 * map.layers[0].ffn.block_stride());
        assert!(plan.planned() <= plan.budget && plan.slots > 0, "{plan:?}");
        let without = fit(&ask(mib << 20, 0)).unwrap();
        assert_eq!(without.merge, None);
        let buffers = merge.buffer_bytes * u64::from(merge.buffers);
        assert!(plan.io_buffers.0 - without.io_buffers.0 == buffers && buffers < mib << 17);
    }
    // Large blocks are read alone: a read costs little beside their bytes.
    assert_eq!(fit(&ask(200 << 20, 2000)).unwrap().merge, None);
}

#[test]
fn a_visits_blocks_find_room_if_that_is_little() {
    let (config, map) = smollm2();
    let plan = |visit_blocks, mib: u64| {
        let needs = SparseNeeds { table_bytes: 40 << 20, book_bytes: 1 << 20, visit_blocks };
        let budget = Budget::Total(ByteCount(mib << 20));
        fit(&PlanRequest { sparse: Some(needs), ..request(budget) }).unwrap()
    };
    let visit = 100;
    // Too little for the dense tensors: they leave a visit what it needs, and are pinned all the same.
    let (alone, with) = (plan(0, 160), plan(visit, 160));
    assert!(alone.passing < visit && with.slots >= with.passing, "{alone:?} {with:?}");
    assert!(with.passing > alone.passing && with.passing >= visit * 3 / 4, "{with:?}");
    let given = alone.resident_dense.0 - with.resident_dense.0;
    assert!(given > 0 && given < alone.resident_dense.0 / 16, "{given} bytes given up");
    // Where there are slots enough, most of them keep what they hold.
    let roomy = plan(visit, 300);
    assert!(roomy.slots > 4 * visit && roomy.passing <= 512, "{roomy:?}");
    let request = request(Budget::Total(ByteCount(0)));
    let minimum = |visit_blocks| {
        let needs = SparseNeeds { table_bytes: 1 << 20, book_bytes: 1 << 20, visit_blocks };
        let request = PlanRequest { sparse: Some(needs), ..request.clone() };
        MemoryPlan::minimum(&request, &config, &map, &backend_bytes)
    };
    assert_eq!(minimum(0), minimum(1000), "the smallest plan needs no more");
}
