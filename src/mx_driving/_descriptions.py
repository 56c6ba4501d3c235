"""What each operator takes and gives. native/src/call/description.cpp has the same as a table; a test compares them.

A line that begins an operator is its name. Below it stand its kind (attention, aggregation or pooling) and its tensors in
order: name, elements, axes, and what else holds, with two spaces or more between. `floating` is float32, float64, float16 or
bfloat16, `index` is int32 or int64, `number` is either. The elements of the output are those of the input that is named there.
Axes of one name have one size; `a * b` is one axis, which an input may also have as two, `2 or 4` is an axis of either size.
`R` is the number of reference points, which depends on an option. After the output come sizes that no input has, which are
given as numbers; options with what each may
be; an axis that divides another; the axes along which processes may share the work; and the operator that this one is built on.
"""

TEXT = """
multi_scale_deformable_attn
    kind                     attention
    value                    floating  bs, num_keys, num_heads, embed_dims                            gradient
    value_spatial_shapes     index     num_levels, 2
    value_level_start_index  index     num_levels
    sampling_locations       floating  bs, num_queries, num_heads, num_levels, num_points, 2          gradient
    attention_weights        floating  bs, num_queries, num_heads, num_levels, num_points             gradient
    output                   value     bs, num_queries, num_heads * embed_dims
    rows                     4
    sharded                  bs, num_queries, num_heads, num_levels, num_points

deformable_aggregation
    kind                     aggregation
    feature_maps             floating  bs, num_feat, c                                                gradient
    spatial_shape            index     cam, scale, 2
    scale_start_index        index     cam, scale
    sample_locations         floating  bs, anchor, pts, cam, 2                                        gradient
    weight                   floating  bs, anchor, pts, cam, scale, group                             gradient
    output                   feature_maps  bs, anchor, c
    rows                     4
    divides                  group, c
    sharded                  bs, anchor, group, cam, pts

geometric_kernel_attention
    kind                     attention
    value                    floating  bs, num_keys, num_heads, embed_dims                            gradient
    spatial_shapes           index     num_levels, 2
    level_start_index        index     num_levels
    sampling_locations       number    bs, num_queries, num_heads, num_levels, num_points, 2
    attention_weights        floating  bs, num_queries, num_heads, num_levels, num_points             gradient
    output                   value     bs, num_queries, num_heads * embed_dims
    rows                     1
    sharded                  bs, num_queries, num_heads, num_levels, num_points

multi_scale_deformable_attn_with_logits
    kind                     attention
    value                    floating  bs, num_keys, num_heads, embed_dims                            gradient
    value_spatial_shapes     index     num_levels, 2
    value_level_start_index  index     num_levels
    reference_points         floating  bs, num_queries, R, 2 or 4                                     gradient
    sampling_offsets         floating  bs, num_queries, num_heads, num_levels, num_points, 2          gradient
    attention_logits         floating  bs, num_queries, num_heads, num_levels * num_points            gradient
    output                   value     bs, num_queries, num_heads * embed_dims
    rows                     4
    option                   reference_axis  level, point
    sharded                  bs, num_queries, num_heads
    built on                 multi_scale_deformable_attn

deformable_aggregation_with_logits
    kind                     aggregation
    feature_maps             floating  bs, num_feat, c                                                gradient
    spatial_shape            index     cam, scale, 2
    scale_start_index        index     cam, scale
    key_points               floating  bs, anchor, pts, 3                                             gradient
    projection               floating  bs, cam, 4, 4                                                  gradient
    logits                   floating  bs, anchor, cam, scale, pts, group                             gradient
    image_size               floating  bs, cam, 2                                                     optional
    pair_scale               floating  bs, anchor, cam, pts                                           optional
    output                   feature_maps  bs, anchor, c
    rows                     4
    divides                  group, c
    sharded                  bs, anchor, group
    built on                 deformable_aggregation

geometric_kernel_attention_with_logits
    kind                     attention
    value                    floating  bs, num_keys, num_heads, embed_dims                            gradient
    spatial_shapes           index     num_levels, 2
    level_start_index        index     num_levels
    reference_points         floating  bs, num_queries, num_heads, 2
    window                   index     num_points, 2
    attention_logits         floating  bs, num_queries, num_heads, num_levels * num_points            gradient
    output                   value     bs, num_queries, num_heads * embed_dims
    rows                     1
    sharded                  bs, num_queries, num_heads
    built on                 geometric_kernel_attention

bev_pool_v3
    kind                     pooling
    feat                     floating  num_feat, c                                                    gradient
    depth                    floating  num_depth                                                      gradient
    ranks_feat               index     n
    ranks_depth              index     n
    ranks_bev                index     n
    output                   feat      bs, c, d, h, w
    sizes                    bs, d, h, w
    rows                     1
    sharded                  c, n
"""
