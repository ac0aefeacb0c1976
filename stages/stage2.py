"""Stage 2: instruction tuning on everything (paper: training, Table 12; docs/molmo2.md 9.2, 10).

The training starts from the weights of stage 1 (--init). It has 30,000 steps of 128 packed rows of
16,384 tokens. The loss weight of a token is 0.2 for points, counts and tracks, and 0.1 for captions
of videos. For other answers it is 2 / sqrt(loss tokens) / sqrt(branches). Without these weights,
long answers and images with many questions would dominate.

`--data FOLDER` reads FOLDER/name/records.jsonl for every name below. docs/data_sets.md shows how to
make these files. --skip-missing skips the names that are not there.
"""

# (group, its sampling weight, [(factor, data sets), ..]). The weights of the groups sum to 1.1 and
# are divided by it. The weight of a group is distributed over its data sets in proportion to
# factor x sqrt(number of records). name:100000 replaces the number of records by 100,000. If all
# sets have :1, only the factors matter.
MIXTURE = [
    ("demo", 0.15, [
        (1, """
            pixmo_ask_model_anything pixmo_cap:100000 pixmo_cap_qa_as_user_qa
            pixmo_multi_image_qa_multi_only_max5 molmo2_human_qa
        """),
        (1.5, "vixmo3_top_level_captions_min_3"),        # dense captions of videos
    ]),
    ("video_academic", 0.20, [(1, """
        tgif:60000 tvqa_with_sub:60000 paxion:60000 moments_in_time_qa:60000 kinetics_qa:60000
        llava_video_mc_academic llava_video_oe_academic perception_test nextqa_mc
        news_video_qa_filtered how2qa sutd_trafficqa social_iq2 sportsqa_oe cinepile_with_sub
        clevrer funqa star intent_qa video_localized_narratives road_text_vqa countix_oe
        camerabench_qa motionbench_train charades_sta_all_qa coin_all_qa youcook2_all_qa
        activitynet_all_qa ego4d_all epic_kitchens_qa video_localized_narratives_caption
        qv_highlights vixmo_syn_video_capqa_v2 vixmo_syn_video_capqa_with_sub_v2
    """)]),
    ("image_academic", 0.25, [(1, """
        coco_2014_vqa_multi text_vqa okvqa chart_qa_weighted doc_qa info_qa
        ai2_diagram_v2_mix_transparent a_okvqa_mc a_okvqa_da science_qa_img tabwmp_da st_qa tally_qa
        mantis_instruct_llava_665k_multi_multi_only mantis_instruct_nlvr2_multi_only
        mantis_instruct_spot-the-diff_multi_only dv_qa:10000 figure_qa:10000 plot_qa:20000
        cosyn_chart_exp cosyn_chemical_exp cosyn_diagram_exp cosyn_document cosyn_math_exp
        cosyn_music_exp cosyn_table_exp cosyn_multidoc_chart_exp cosyn_multidoc_chemical_exp
        cosyn_multidoc_diagram_exp cosyn_multidoc_doc_exp cosyn_multidoc_music_exp
        cosyn_multidoc_table_exp pixmo_clocks:250000
    """)]),
    # The factors multiply the square roots, so a line with more or larger sets still gets more.
    ("tracking", 0.15, [
        (0.40 / 1.11, """
            mevis_track ref_yt_vos_track lv_vis_track vicas_track:30000 revos_track
            molmo2_video_track
        """),
        (0.05 / 1.11, "burst_track ref_davis17_track yt_vis_track moca_track"),
        (0.20 / 1.11, """
            mevis_ground lv_vis_ground vicas_ground:30000 revos_ground molmo2_video_track_ground
        """),
        (0.01 / 1.11, "burst_ground moca_ground"),
        (0.15 / 1.11, """
            mevis_single_point_track lv_vis_single_point_track vicas_single_point_track:30000
            revos_single_point_track molmo2_video_single_point_track
        """),
        (0.20 / 1.11, """
            webuav_single_point_track got10k_single_point_track vasttrack_single_point_track
            trackingnet_single_point_track
        """),
        (0.10 / 1.11, """
            burst_single_point_track lvosv1_single_point_track lvosv2_single_point_track
            lasot_single_point_track uwcot_single_point_track webuot_single_point_track
            latot_single_point_track tnl2k_single_point_track tnllt_single_point_track
        """),
    ]),
    ("video_pointing", 0.15, [
        (0.4, "vixmo_points_minmax_0_5:1"),
        (0.3, "vixmo_points_minmax_6_25:1"),
        (0.1, "vixmo_points_minmax_26_60:1"),
        (0.2, "academic_points_clip_63s_2fps:1"),
    ]),
    ("image_pointing", 0.10, [
        # sqrt(2): in the paper every image is two examples, for points and for points with count
        (2 ** 0.5, "pixmo_points_train pixmo_count_train pixmo_points_high_freq_train"),
        (1, "pixmo_multi_points:200000 cosyn_point"),
    ]),
    ("nlp", 0.0995, [(1, "tulu4")]),
    ("hardcodes", 0.0005, [(1, "molmo2_hardcodes")]),    # questions such as "who are you?"
]

RECIPE = {
    "steps": 30_000,
    "batch": 128,
    "micro_batch": 2,
    "data.max_tokens": 16_384,
    "pack_crops": 128,
    "data.max_crops": 8,
    "data.multi_turn_share": 0.2,    # fraction of videos with several point questions
    "data.high_res_share": 0.3,      # fraction of images with points that have up to 24 crops
    "data.max_frames": 128,
    "lr.vit": 5e-6,
    "lr.connector": 5e-6,
    "lr.llm": 1e-5,
    "warmup.vit": 200,
    "warmup.connector": 200,
    "warmup.llm": 200,
    "response_dropout": 0.0,
    "residual_dropout": 0.1,         # at every position
    "freeze_embedding": True,
    "data.prefix_all": False,        # plain text for questions of users, "style:" for benchmarks
    "data.separator": ";",
    "data.sqrt_length": True,
    "data.sqrt_branches": True,
    "data.point_weight": 0.2,
    "data.video_caption_weight": 0.1,
    "data.n_transcripts": 0,
}
